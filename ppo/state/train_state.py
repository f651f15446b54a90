"""What a restart needs besides tensors, as one JSON-able state.

Owns what is in it, and what makes a saved one unfit. Must not know where it is written.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Protocol

from ppo.config import (
    Config,
    EarlyStopConfig,
)
from ppo.data.sampler import PromptSampler
from ppo.guards.guard import Guard
from ppo.kl import KLController, make_kl_controller
from ppo.run.run import Run
from sharding.mesh import Mesh

logger = logging.getLogger(__name__)

FIRST_STEPS = 5
"""iterations that lengths are compared with"""


@dataclass
class EarlyStop:
    """How often trainer.early_stop.metric was not better than its best, one after the other."""

    config: EarlyStopConfig
    best: float | None = None
    """negated where the lowest is best"""
    worse: int = 0

    def note(self, values: Mapping[str, float]) -> None:
        """Look at a step's values; without the metric nothing is known. NaN is not better."""
        value = signed_metric(self.config.metric, values)
        if value is None:
            return
        if not math.isnan(value) and (self.best is None or value > self.best):
            self.best, self.worse = value, 0
        else:
            self.worse += 1

    @property
    def reason(self) -> str:
        """Why the run ends; empty while it goes on."""
        metric = self.config.metric
        if metric is None or self.worse < self.config.patience:
            return ""
        text = f"trainer.early_stop: {metric} was {self.worse} times not better"
        if self.best is None:
            return text
        return f"{text} than {-self.best if metric.startswith('-') else self.best:.6g}"

    def state_dict(self) -> dict[str, Any]:
        """Of which metric, the best value, and how often it was not reached."""
        return {"metric": self.config.metric, "best": self.best, "worse": self.worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting, but anew where it was another metric."""
        if state["metric"] == self.config.metric:
            self.best, self.worse = state["best"], state["worse"]


class Stateful(Protocol):
    """What a restart puts back as it was."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


@dataclass
class TrainState:
    """What a restart needs besides tensors: JSON, the same on every rank."""

    sampler: PromptSampler
    kl_controller: KLController
    guard: Guard
    running: Stateful | None = None
    """statistics over the run that scores and returns are normalised with"""
    early_stop: EarlyStop = field(default_factory=lambda: EarlyStop(EarlyStopConfig()))
    step: int = 0
    """iterations done"""
    validation_due: bool = False
    """the validation after `step` is still to do: a stop has interrupted it, or none was yet"""
    position: dict[str, Any] | None = None
    """where the sampler stood after them; None = at its start"""
    surplus: Callable[[], Any] = lambda: None
    """gives samples that were made and not yet trained on, as JSON; collective"""
    first_lengths: list[float] = field(default_factory=list)
    """mean lengths of responses in the first iterations"""
    said_best_is_missing: bool = False
    """not part of the state"""
    named: dict[str, str] = field(default_factory=dict)
    """metrics that the configuration names, by key, until a step has shown whether they are
    there; not part of the state"""

    def commit(self, surplus: Callable[[], Any] = lambda: None) -> None:
        """End an iteration: only now do its prompts count as used."""
        self.step, self.surplus = self.step + 1, surplus
        self.position = self.sampler.state_dict()

    def length_drift(self, mean: float) -> float:
        """Mean length of an iteration's responses over that of the first FIRST_STEPS."""
        if len(self.first_lengths) < FIRST_STEPS:
            self.first_lengths.append(mean)
        return mean * len(self.first_lengths) / max(sum(self.first_lengths), 1.0)

    def last_step(self, total_steps: int, values: Mapping[str, float], run: Run) -> int:
        """The last iteration of the run: `total_steps`, or this one where the epochs hold no other
        batch of prompts, or trainer.early_stop says so by the values of the step."""
        self.early_stop.note(values)
        self.say_missing(values)
        if not self.sampler.has_next():
            return self.step
        if not self.early_stop.reason:
            return total_steps
        run.ends_early(self.early_stop.reason)
        return self.step

    def say_missing(self, values: Mapping[str, float]) -> None:
        """Warn, once, of each metric that the configuration names and that a step does not have.

        Only a validation has those of a validation, and only an update of the actor all others.
        """
        measured = {
            True: any(name.startswith("val-") for name in values),
            False: "actor/grad_norm" in values,
        }
        for key, metric in [*self.named.items()]:
            if not measured[metric.startswith("val-")]:
                continue
            del self.named[key]
            if metric in values:
                continue
            near = get_close_matches(metric, values, n=1)
            logger.warning(
                "%s: step %d has no metric %s%s; nothing is done until one has it, said once",
                key,
                self.step,
                metric,
                f" (did you mean {near[0]}?)" if near else "",
                extra={"every_rank": True},
            )

    def state_dict(self) -> dict[str, Any]:
        """The state at the last iteration boundary. Collective where there is a surplus."""
        return {
            "step": self.step,
            "validation_due": self.validation_due,
            "early_stop": self.early_stop.state_dict(),
            "surplus": self.surplus(),
            "sampler": self.position,
            "kl_controller": self.kl_controller.state_dict(),
            "guard": self.guard.state_dict(),
            "running": None if self.running is None else self.running.state_dict(),
            "first_lengths": self.first_lengths,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the iteration that the checkpoint ended with."""
        self.step, self.position = state["step"], state["sampler"]
        self.validation_due = state.get("validation_due", False)
        if "early_stop" in state:
            self.early_stop.load_state_dict(state["early_stop"])
        waiting = state.get("surplus")
        self.surplus = lambda: waiting
        if self.position is not None:
            self.sampler.load_state_dict(self.position)
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.guard.load_state_dict(state.get("guard", {}))
        self.first_lengths = list(state.get("first_lengths", []))
        self.load_running(state)

    def load_running(self, state: Mapping[str, Any]) -> None:
        """The statistics of a saved state."""
        if self.running is not None and state.get("running") is not None:
            self.running.load_state_dict(state["running"])


def new_state(config: Config, sampler: PromptSampler, mesh: Mesh, running: Stateful) -> TrainState:
    """The state before the first iteration."""
    trainer = config.trainer
    return TrainState(
        sampler,
        make_kl_controller(config.algorithm.kl_ctrl),
        Guard(
            config.watched_rules(),
            critic_warmup=trainer.critic_warmup,
            groups=mesh.device_groups,
        ),
        running,
        EarlyStop(trainer.early_stop),
        validation_due=trainer.val_before_train,
        named=_named_metrics(config),
    )


def _named_metrics(config: Config) -> dict[str, str]:
    """The metrics of early stop and of the rules of guards, by key; keep_best says it itself."""
    named = {f"guards.rules[{i}]": rule["metric"] for i, rule in enumerate(config.guards.rules)}
    if config.trainer.early_stop.metric is not None:
        named["trainer.early_stop.metric"] = config.trainer.early_stop.metric.removeprefix("-")
    return {key: metric for key, metric in named.items() if not metric.startswith("guard/")}


def signed_metric(name: str | None, values: Mapping[str, float]) -> float | None:
    """A step's value of a metric such that higher is better; a minus before its name = lower is."""
    value = None if name is None else values.get(name.removeprefix("-"))
    return -value if value is not None and name is not None and name.startswith("-") else value


def state_problem(step: int, saved: Mapping[str, Any]) -> str | None:
    """What makes this no state that training could go on from after that step."""
    sampler, controller = saved.get("sampler"), saved.get("kl_controller")
    if saved.get("step") != step:
        return f"its state is of step {saved.get('step')!r}"
    if not isinstance(saved.get("config"), str):
        return "its state has no configuration"
    if not isinstance(controller, dict) or not _is_coefficient(controller.get("value")):
        return f"its KL controller is {controller!r}"
    early = saved.get("early_stop", {"best": None, "worse": 0, "metric": None})
    if not isinstance(early, dict) or not _is_count(early.get("worse")):
        return f"its early stop is {early!r}"
    if not isinstance(saved.get("guard", {}), dict):
        return f"what it has of guards is {saved['guard']!r}"
    if sampler is None:
        return None
    counts = ("epoch", "position", "num_prompts")
    if not isinstance(sampler, dict) or not all(_is_count(sampler.get(key)) for key in counts):
        return f"its sampler is {sampler!r}"
    if sampler["position"] > sampler["num_prompts"]:
        return f"its sampler is at {sampler['position']} of {sampler['num_prompts']} prompts"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_coefficient(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0
