"""Numbers that go wrong in a run: each fault is a context in which one thing of it is replaced.

Owns what strikes, where and when. Must not know what guards do about it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import train_ppo
from ppo.metrics import Metrics
from ppo.models.learner import Learner
from ppo.rollout.scoring import Scorer
from sharding.fsdp import gradient_norm


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """owner.name is what `make` makes of it."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def local(parameter: Any) -> torch.Tensor:
    """This rank's shard."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


@contextmanager
def gradient(rank: int, *, update: int, on: int | None, norm: float) -> Iterator[None]:
    """Before the `update`-th optimizer step of the actor a gradient on rank `on` is `norm`; None:
    on all ranks, and it is the norm of the whole."""
    seen = [0]

    def make(clip: Any) -> Any:
        def clip_gradients(learner: Learner) -> Any:
            seen[0] += learner.name == "actor"
            if learner.name == "actor" and seen[0] == update and on in (None, rank):
                grads = [p.grad for p in learner.module.parameters() if p.grad is not None]
                if on is None:
                    scale = norm / gradient_norm(learner.module, learner.device)
                    for grad in grads:
                        local(grad).mul_(scale)
                else:
                    local(grads[0]).fill_(norm)
            return clip(learner)

        return clip_gradients

    with replaced(Learner, "clip_gradients", make):
        yield


@contextmanager
def weights(model: str, *, after: int, factor: float) -> Iterator[None]:
    """After the `after`-th optimizer step of a model its weights are so many times as large."""
    seen = [0]

    def make(step: Any) -> Any:
        def spoiling(learner: Learner) -> None:
            step(learner)
            seen[0] += learner.name == model
            if learner.name == model and seen[0] == after:
                for parameter in learner.module.parameters():
                    local(parameter.data).mul_(factor)

        return spoiling

    with replaced(Learner, "step", make):
        yield


@contextmanager
def memory(rank: int, *, on: int, reading: int, share: float) -> Iterator[None]:
    """Rank `on` reads such a share of its device's memory, once."""
    seen = [0]

    def make(_: Any) -> Any:
        def peak_share(metrics: Metrics) -> float:
            seen[0] += 1
            return share if rank == on and seen[0] == reading else 0.1

        return peak_share

    with replaced(Metrics, "peak_share", make):
        yield


@contextmanager
def rewards(batch: int, *, less: float) -> Iterator[None]:
    """Every score of one batch is so much lower."""
    seen = [0]

    def make(score: Any) -> Any:
        def collapsing(scorer: Scorer, samples: Any, *rest: Any, **named: Any) -> None:
            score(scorer, samples, *rest, **named)
            seen[0] += 1
            if seen[0] == batch:
                samples.scores -= less

        return collapsing

    with replaced(Scorer, "score", make):
        yield


@contextmanager
def sums_after_each_step(found: list[Any]) -> Iterator[None]:
    """No fault: notes what actor and critic are after each step."""

    def make(obey: Any) -> Any:
        def looking(config: Any, run: Any, checkpoints: Any, models: Any, *rest: Any) -> bool:
            try:
                return obey(config, run, checkpoints, models, *rest)
            finally:
                found.append({name: _sums(m) for name, m in models.trained().items()})

        return looking

    with replaced(train_ppo, "obey_guards", make):
        yield


def _sums(learner: Learner) -> tuple[float, float, int]:
    """Of this rank's shards: weights, moments, and the optimizer's steps."""
    total = sum(local(p.detach()).double().sum().item() for p in learner.module.parameters())
    states = learner.optimizer.state.values()
    moments = sum(local(state["exp_avg"]).double().sum().item() for state in states)
    [steps] = {int(state["step"].item()) for state in states} or {0}
    return total, moments, steps
