"""Decides which rules hold, alike on every rank, and keeps what they have changed for good.

Owns the three moments of a decision: before the updates of an iteration, before an optimizer step,
and at the end of the iteration. Must not know models, batches or checkpoints: who asks does what is
decided. Everything here is decided from values that all ranks have exchanged.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ppo.config import FIRES_WINDOW, MEMORY, Rule

logger = logging.getLogger(__name__)

Number = float | Tensor


class GuardAbort(RuntimeError):
    """A guard ends the run; raised on every rank."""


class Verdict(NamedTuple):
    """What is done with a mini-batch whose gradient is there."""

    norm: float
    """of the gradient, over all ranks"""
    skip: bool
    """no optimizer step"""
    stop: bool
    """no further mini-batch and epoch in this iteration"""
    halve: bool
    """half of the token budget from the next one on"""


@dataclass
class GuardState:
    """What survives a restart, and a rollback: JSON, the same on every rank."""

    lr_factor: dict[str, float] = field(default_factory=dict)
    """by model, on the schedule"""
    lr: dict[str, float] = field(default_factory=dict)
    """by model, in the place of the schedule"""
    kl_factor: float = 1.0
    """on the coefficients of the KL penalties"""
    halvings: dict[str, int] = field(default_factory=dict)
    """of the token budget, by model"""
    held: dict[str, int] = field(default_factory=dict)
    """iterations in a row for which a rule has held"""
    before: dict[str, float] = field(default_factory=dict)
    """what a change is measured against"""
    fires: dict[str, list[int]] = field(default_factory=dict)
    """the last iterations in which a rule has fired"""
    undone: int = 0
    """iterations that the schedule is behind: rollbacks have undone them"""
    critic_since: int = 0
    """place in the schedule where the critic was new"""


class Guard:
    """The rules of a run. `before_update` begins an iteration, `after_step` ends it."""

    def __init__(
        self,
        rules: Sequence[Rule] = (),
        *,
        critic_warmup: int = 0,
        groups: Sequence[ProcessGroup] = (),
    ) -> None:
        """
        Args:
            critic_warmup: iterations in which only the critic is trained, from where it was new.
            groups: device groups; reducing over one after the other is reducing over all ranks.
        """
        self.state = GuardState()
        self._alarms: dict[Rule, str] = {}
        # of two that say the same, which would count twice, the last: a rule beside the preset's
        self._rules = tuple({str(rule): rule for rule in rules}.values())
        self._warmup, self._groups = critic_warmup, groups
        self._step = 0
        self._holding: dict[Rule, str] = {}
        """rules that hold in this iteration, in words"""
        self._seen: set[Rule] = set()
        """rules whose metric was there in this iteration"""
        self._fired: set[Rule] = set()
        self._taken: Counter[str] = Counter()
        self._mini_batches: Counter[str] = Counter()
        self._abort = ""

    # What has been decided.

    @property
    def alarms(self) -> dict[str, str]:
        """What is the matter at the moment, in words, by metric."""
        return {rule.metric: text for rule, text in self._alarms.items()}

    @property
    def can_roll_back(self) -> bool:
        """Whether any rule needs a checkpoint to go back to."""
        return any("rollback" in rule.names for rule in self._rules)

    @property
    def rolls_back(self) -> bool:
        """The iteration that `after_step` has ended is to be undone."""
        return "rollback" in self._taken

    @property
    def resets_critic(self) -> bool:
        """The critic is to begin anew."""
        return "reset_critic" in self._taken

    def raise_abort(self) -> None:
        """Raise GuardAbort if a rule ends the run."""
        if self._abort:
            raise GuardAbort(self._abort)

    def schedule_step(self, step: int) -> int:
        """Place of an iteration in the schedules: iterations that were undone do not count."""
        return step - self.state.undone

    def trains_actor(self, step: int) -> bool:
        """Whether the critic's warm-up is over."""
        return self.schedule_step(step) - self.state.critic_since > self._warmup

    def adjusted_lr(self, model: str, scheduled: float) -> float:
        """The learning rate in the place of the scheduled one."""
        return self.state.lr.get(model, scheduled) * self.state.lr_factor.get(model, 1.0)

    # The moments of a decision.

    def before_update(self, step: int, known: Mapping[str, float]) -> bool:
        """Begin an iteration whose batch is there: whether its updates are left out.

        known: metrics so far, the same on every rank.
        """
        self._step = step
        for scratch in (self._holding, self._seen, self._fired, self._taken, self._mini_batches):
            scratch.clear()
        rules = [rule for rule in self._rules if rule.is_of_batch and rule.metric in known]
        return "skip_update" in self._take(rules, known)

    def watched(self, model: str) -> list[str]:
        """Metrics of a model's update whose sums `judge` wants of every mini-batch."""
        names = {rule.metric for rule in self._of_update(model)}
        return sorted(names - {MEMORY, f"{model}/grad_norm"})

    def judge(
        self,
        model: str,
        norm: Tensor,
        sums: Mapping[str, tuple[Number, Number]],
        memory_share: float = 0.0,
    ) -> Verdict:
        """What is done with a mini-batch. Collective; the host waits for the device here.

        Args:
            norm: [] of the model's gradient.
            sums: total and count of each watched metric on this rank, of this mini-batch.
            memory_share: of the device's memory, most that this rank's tensors held.
        """
        self._mini_batches[model] += 1
        names = self.watched(model)
        seen = over_all_ranks(norm, memory_share, [sums[name] for name in names], self._groups)
        values = {f"{model}/grad_norm": seen.norm, MEMORY: seen.memory_share}
        values |= {n: mean for n, mean in zip(names, seen.means, strict=True) if mean is not None}
        where = f"mini-batch {self._mini_batches[model]} of the {model}"
        taken = self._take(self._of_update(model), values, where)
        is_broken = not math.isfinite(seen.norm)
        if is_broken and "skip_update" not in taken:
            self._say(f"gradient norm {seen.norm} in {where}: its update is left out")
        stop, halve = "stop_epoch" in taken, "halve_budget" in taken
        return Verdict(seen.norm, is_broken or stop or "skip_update" in taken, stop, halve)

    def halved(self, model: str) -> None:
        """Note that the token budget of a model is half of what it was."""
        self.state.halvings[model] = self.state.halvings.get(model, 0) + 1

    def after_step(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """End the iteration with its reduced values; the metrics guard/*."""
        assert step == self._step, (step, self._step)
        rest = [r for r in self._rules if not (r.is_of_mini_batch or r.is_of_batch)]
        self._take([rule for rule in rest if rule.metric in values], values)
        for rule in self._rules:
            if rule in self._seen:
                self._count(rule, values.get(rule.metric, math.nan))
        for rule in self._rules:  # in their order, whatever has fired first
            if rule in self._fired:
                self._change(rule)
        found: dict[str, float] = {f"guard/{name}": n for name, n in sorted(self._taken.items())}
        factors = {f"lr_factor/{model}": f for model, f in self.state.lr_factor.items()}
        factors["kl_factor"] = self.state.kl_factor
        return found | {f"guard/{name}": f for name, f in factors.items() if f != 1.0}

    def rolled_back(self, step: int, target: Mapping[str, Any]) -> None:
        """After iteration `step` everything else is as a checkpoint has it.

        target: the state that it has of guards, and the step.
        """
        then = _read_state(target.get("guard"))
        self.state.undone = step - (target["step"] - then.undone)
        self.state.critic_since = then.critic_since

    def critic_is_new(self, step: int) -> None:
        """After iteration `step` the critic begins anew."""
        self.state.critic_since = self.schedule_step(step)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict` of an earlier start."""
        self.state = _read_state(state)

    def _of_update(self, model: str) -> list[Rule]:
        """Rules that are decided at the mini-batches of a model."""
        own = (f"{model}/", MEMORY)
        return [r for r in self._rules if r.is_of_mini_batch and r.metric.startswith(own)]

    def _take(
        self, rules: Sequence[Rule], values: Mapping[str, float], where: str = ""
    ) -> set[str]:
        """The actions of those rules that fire, counted."""
        taken: set[str] = set()
        for rule in rules:
            if rule.metric in values and self._fires(rule, values[rule.metric], where):
                taken |= rule.names
        self._taken.update(taken - {"warn"})
        return taken

    def _fires(self, rule: Rule, value: float, where: str) -> bool:
        """Whether the rule holds now, and has for long enough; said where it is new."""
        key = str(rule)
        self._seen.add(rule)
        if not rule.holds(value, self.state.before.get(key)):
            return False
        is_first = rule not in self._holding
        self._holding.setdefault(rule, f"{rule.metric} = {value:.4g}, {rule.when}")
        so_far = self.state.held.get(key, 0) + 1
        if so_far < rule.for_steps:
            return False
        self._fired.add(rule)
        if is_first and (so_far == rule.for_steps or rule.max_fires is not None):
            does = ", ".join(str(action) for action in rule.actions if action.name != "warn")
            text = self._holding[rule] + (f", in {where}" if where else "")
            self._say(": ".join(filter(None, (text, does or rule.advice))))
        return True

    def _say(self, text: str) -> None:
        logger.warning("step %d: %s", self._step, text, extra={"every_rank": True})

    def _count(self, rule: Rule, value: float) -> None:
        """How long the rule has held, how often it has fired, and what the next change is of."""
        key, state = str(rule), self.state
        state.held[key] = state.held.get(key, 0) + 1 if rule in self._holding else 0
        if rule in self._holding:
            self._alarms[rule] = self._holding[rule]
        else:
            self._alarms.pop(rule, None)
        is_undone = rule in self._fired and "rollback" in rule.names
        if rule.condition == "change" and math.isfinite(value) and not is_undone:
            state.before[key] = value
        if rule not in self._fired or rule.max_fires is None:
            return
        recent = [s for s in state.fires.get(key, []) if s > self._step - FIRES_WINDOW]
        state.fires[key] = [*recent, self._step]
        if len(state.fires[key]) > rule.max_fires:
            self._abort = (
                f"guard: {rule} fired {len(state.fires[key])} times within {FIRES_WINDOW} steps, "
                f"the last time with {self._holding[rule]}: what it does is no cure; look at "
                "metrics.jsonl before its first time (guard/*), or raise guards.max_fires"
            )

    def _change(self, rule: Rule) -> None:
        """What the rule changes for good."""
        state, model = self.state, rule.model
        for name, number in rule.actions:
            match name, number:
                case "scale_lr", float():
                    state.lr_factor[model] = state.lr_factor.get(model, 1.0) * number
                case "set_lr", float():
                    state.lr[model] = number
                    state.lr_factor.pop(model, None)
                case "scale_kl_coef", float():
                    state.kl_factor *= number
                case "abort", None:
                    self._abort = self._abort or f"guard: {rule}: {self._holding[rule]}"


class _Seen(NamedTuple):
    """Of a mini-batch, over all ranks."""

    norm: float
    memory_share: float
    means: list[float | None]
    """None: of nothing"""


def over_all_ranks(
    norm: Tensor,
    memory_share: float,
    sums: Sequence[tuple[Number, Number]],
    groups: Sequence[ProcessGroup],
) -> _Seen:
    """The largest norm and share, and the means, of all ranks: bitwise the same on each.

    One small exchange per group, and one copy to the host for all of it. Collective.
    """
    numbers = [norm, memory_share, *(total for total, _ in sums), *(count for _, count in sums)]
    row = torch.stack([_on_device(number, norm) for number in numbers])  # [2 + 2k]
    for group in groups:
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, row, group=group)
        table = torch.stack(rows)
        row = torch.cat([table[:, :2].amax(0), table[:, 2:].sum(0)])
    largest, share, *rest = row.tolist()
    totals, counts = rest[: len(sums)], rest[len(sums) :]
    means = [t / c if c else None for t, c in zip(totals, counts, strict=True)]
    return _Seen(largest, share, means)


def _on_device(number: Number, like: Tensor) -> Tensor:
    """[] float64; a float is written by a kernel, without a copy that the host waits for."""
    if isinstance(number, Tensor):
        return number.detach().reshape(()).to(like.device, torch.float64)
    return like.new_full((), number, dtype=torch.float64)


def _read_state(state: Mapping[str, Any] | None) -> GuardState:
    """What another version wrote and this one does not know is left out."""
    known = {f.name for f in fields(GuardState)}
    return GuardState(**{k: v for k, v in (state or {}).items() if k in known})
