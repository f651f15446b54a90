"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): the groups that an iteration trains on.

Owns which groups of a round are kept, when there are enough, and those kept for the next iteration.
Must not know how samples are made and scored, or models. A group are the responses to one prompt.
Everything is decided from what all ranks know, so that it is the same on any number of ranks.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ppo.batch.samples import Samples, joined, of_prompts
from ppo.config import Config, ConfigError, Problem
from ppo.data.sampler import PromptSampler
from ppo.metrics import Metrics
from ppo.rollout.figures import PASS_SCORE
from ppo.rollout.surplus import decoded, encoded
from sharding.agree import gather
from sharding.mesh import Mesh

logger = logging.getLogger(__name__)


class NothingToLearn(RuntimeError):
    """No group of an iteration has a spread; on every rank."""


class Verdict(NamedTuple):
    """What becomes of the groups of a round, [G] bool each; each is in one of them."""

    kept: Tensor  # the metric differs
    right: Tensor  # all responses pass
    wrong: Tensor  # none does
    failed: Tensor  # fewer than two responses have a value


def judge(values: Tensor, known: Tensor, n: int) -> Verdict:
    """Compare the n responses of each group.

    Args:
        values: float64 [G x n], the metric of each sample.
        known: bool [G x n], False where it has none: its reward failed.
    """
    values, known = values.reshape(-1, n), known.reshape(-1, n)
    least = torch.where(known, values, torch.inf).amin(-1)
    largest = torch.where(known, values, -torch.inf).amax(-1)
    failed, kept = known.sum(-1) < 2, largest > least
    right = ~failed & ~kept & (least >= PASS_SCORE)
    return Verdict(kept & ~failed, right, ~failed & ~kept & ~right, failed)


class GroupPool:
    """The groups that wait to be trained on.

    Without algorithm.filter_groups an iteration has one round, and takes all of it.

    Args:
        surplus: what `surplus` has given before a restart; the first rank holds its samples.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        sampler: PromptSampler,
        surplus: Mapping[str, Any] | None = None,
    ) -> None:
        self._config, self._mesh, self._sampler = config, mesh, sampler
        self._keys = config.algorithm.filter_groups
        surplus = surplus if self._keys.enable else None
        found = decoded(surplus, config.rollout.n, holds=mesh.rank == 0)
        self._waiting = [] if found is None else [found]
        self._last: Samples | None = None
        self._counts: Counter[str] = Counter()
        self.round = 0
        """rounds of the iteration so far"""

    @property
    def _size(self) -> int:
        return sum(len(part.prompts) for part in self._waiting)

    def wants_more(self) -> bool:
        """Whether another round is to be generated for the iteration."""
        if self.round == 0:
            return True
        most = self._keys.max_num_gen_batches or len(self._sampler)
        return (
            self._keys.enable
            and self._size < self._config.data.train_batch_size
            and self.round < most
            and self._sampler.has_next()
        )

    def add(self, samples: Samples) -> None:
        """Keep those groups of a scored round that differ. Collective."""
        self.round += 1
        self._last = samples
        if self._sampler.wants_notes:
            self._sampler.note(samples.prompts, self._rights(samples))
        if not self._keys.enable:
            self._waiting.append(samples)
            return
        verdict = judge(*self._values(samples), samples.n)
        self._waiting.append(of_prompts(samples, verdict.kept.nonzero()[:, 0].tolist()))
        for name in verdict._fields[1:]:
            self._counts[f"dropped_{name}"] += int(getattr(verdict, name).sum())

    def take(self, metrics: Metrics) -> Samples:
        """The samples of the iteration: data.train_batch_size groups, or as many as there are.

        Raises NothingToLearn on all ranks when there are none; but not where the prompts of the run
        have come to their end with them: then the iteration has samples of which none counts.
        """
        if self._sampler.pooled is not None:
            metrics.set("training/pooled", self._sampler.pooled)
        if not self._keys.enable:
            self.round, [samples], self._waiting = 0, self._waiting, []
            return samples
        size, found = self._config.data.train_batch_size, joined(self._waiting)
        number = len(found.prompts)
        rest = of_prompts(found, range(size, number)) if number > size else None
        found = of_prompts(found, range(size)) if number > size else found
        self._log(metrics, min(number, size), max(0, number - size))
        if number < size:
            found = self._too_few(found)
        self._waiting = [rest] if rest is not None and self._keys.surplus == "keep" else []
        self.round, self._last, self._counts = 0, None, Counter()
        return found

    def surplus(self) -> Callable[[], Any]:
        """What gives the groups that wait now as JSON: on the first rank. That is collective."""
        return partial(encoded, list(self._waiting), self._mesh)

    def drop_surplus(self) -> Callable[[], Any]:
        """Forget the groups that wait; what `surplus` gives then."""
        self._waiting = []
        return self.surplus()

    def _too_few(self, found: Samples) -> Samples:
        size, number = self._config.data.train_batch_size, len(found.prompts)
        said = f"{number} of {size} groups differ in {self._keys.metric or 'the score'} after "
        said += f"{self.round} rounds of {self._config.data.gen_batch_size} prompts ("
        said += ", ".join(f"{self._counts[k]} {w}" for k, w in _WORDS.items()) + ")"
        if number:
            logger.warning("algorithm.filter_groups: %s: the iteration trains on these", said)
            return found
        if self._sampler.has_next():
            raise NothingToLearn(
                f"algorithm.filter_groups: {said}: there is nothing to learn; look at the samples, "
                "take easier or harder data, or raise max_num_gen_batches"
            )
        logger.warning("algorithm.filter_groups: %s, and the prompts have come to their end", said)
        assert self._last is not None
        self._last.failed[:] = True  # counted in no loss: no optimizer takes a step
        self._last.scores[:] = 0.0
        return self._last

    def _log(self, metrics: Metrics, kept: int, surplus: int) -> None:
        metrics.set("filter_groups/num_gen_batches", self.round)
        metrics.set("filter_groups/kept", kept)
        metrics.set("filter_groups/surplus", surplus)
        for name in _WORDS:
            metrics.set(f"filter_groups/{name}", self._counts[name])

    def _rights(self, samples: Samples) -> list[bool | None]:
        """Whether all responses to a prompt pass; None where the reward of all failed. Collective.

        Failed samples say nothing."""
        table = torch.zeros(samples.total, 2)
        passed = (samples.scores >= PASS_SCORE) & ~samples.failed
        table[samples.numbers] = torch.stack([passed, ~samples.failed], -1).float()
        dist.all_reduce(table, group=self._mesh.host_group)  # one rank has each row, others zeros
        passes, scored = table.view(-1, samples.n, 2).sum(1).unbind(-1)
        return [
            None if number == 0 else right == number
            for right, number in zip(passes.tolist(), scored.tolist(), strict=True)
        ]

    def _values(self, samples: Samples) -> tuple[Tensor, Tensor]:
        """The metric of all samples [B] float64, and which have one. Collective."""
        own = [self._value(samples, index) for index in range(len(samples))]
        table = torch.zeros(samples.total, 3, dtype=torch.float64)
        table[samples.numbers] = torch.tensor(
            [
                [0.0 if value is None else value, value is not None, not failed]
                for value, failed in zip(own, samples.failed.tolist(), strict=True)
            ],
            dtype=torch.float64,
        ).reshape(len(samples), 3)
        dist.all_reduce(table, group=self._mesh.host_group)  # one rank has each row, others zeros
        values, known, scored = table.unbind(1)
        if scored.any() and not known.any():
            self._refuse(samples)
        return values, known.bool()

    def _value(self, samples: Samples, index: int) -> float | None:
        name, components = self._keys.metric, samples.components[index]
        if samples.failed[index]:
            return None
        if self._keys.is_of_score:
            return samples.total_score(index)
        if name == "acc" and not any(key.startswith("extra/") for key in components):
            return components.get("function", components.get("episode"))
        return components.get(f"extra/{name}")

    def _refuse(self, samples: Samples) -> None:
        """Say that no sample has the metric, on every rank. Collective."""
        own = {key for components in samples.components for key in components}
        names = set().union(*gather(own, self._mesh.host_group))
        entries = sorted(name.removeprefix("extra/") for name in names if name.startswith("extra/"))
        raise ConfigError(
            [
                Problem(
                    "algorithm.filter_groups.metric",
                    self._keys.metric,
                    "the reward gives no such entry",
                    f"use {' or '.join(['score', *entries])}",
                )
            ]
        )


_WORDS = {
    "dropped_right": "all right",
    "dropped_wrong": "all wrong",
    "dropped_failed": "without two scores",
}
