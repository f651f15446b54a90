"""Section guards, and the vocabulary of its rules: conditions, actions, presets.

Owns what a rule is and which rules a configuration has. ppo/guards/ decides whether one holds, and
the loop does what it says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from ppo.config.bounds import Positive, PositiveInt, Share
from ppo.config.fields import Section

Preset = Literal["default", "strict", "none"]
Condition = Literal["above", "below", "not_finite", "change"]
MEMORY = "perf/max_memory_share"
UPDATE_METRICS = (
    *("actor/pg_loss", "actor/kl_loss", "actor/ppo_kl", "actor/ppo_kl_k3", "actor/pg_clipfrac"),
    *("actor/pg_clipfrac_lower", "actor/grad_norm", "critic/vf_loss", "critic/vf_clipfrac"),
    *("critic/vpred_mean", "critic/grad_norm"),
)
"""known of every mini-batch before its optimizer step"""
BATCH_METRICS = (
    *("actor/ref_kl", "actor/reward_kl_penalty", "rollout_corr/is_mean", "reward/failed"),
    *("rollout_corr/eff_sample_size", "reward/timeout", "reward/alone"),
)
"""known of an iteration before its updates"""


class ActionTraits(NamedTuple):
    """What checks and guards know of an action."""

    counts: bool = True
    """too many within a few steps end the run"""
    number: str = ""
    """what the number behind it is; empty where it takes none"""
    most: float = 1e9
    """the largest that it takes"""
    example: str = "0.5"


ACTIONS: dict[str, ActionTraits] = {
    "warn": ActionTraits(counts=False),
    "stop_epoch": ActionTraits(counts=False),
    "skip_update": ActionTraits(),
    "halve_budget": ActionTraits(counts=False),
    "scale_lr": ActionTraits(number="a factor"),
    "set_lr": ActionTraits(number="a learning rate", most=1.0, example="1e-6"),
    "scale_kl_coef": ActionTraits(number="a factor"),
    "rollback": ActionTraits(),
    "reset_critic": ActionTraits(),
    "abort": ActionTraits(counts=False),
}


class Action(NamedTuple):
    """What a rule has done."""

    name: str
    number: float | None = None

    def __str__(self) -> str:
        return self.name if self.number is None else f"{self.name} {self.number:g}"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When a metric is so, for so many iterations in a row, do that."""

    metric: str
    condition: Condition
    threshold: float = 0.0
    """not used by not_finite; of change: a share of the value of the iteration before"""
    for_steps: int = 1
    actions: tuple[Action, ...]
    max_fires: int | None = None
    """within FIRES_WINDOW iterations; None: no limit"""
    advice: str = ""
    """said with it"""

    def holds(self, value: float, before: float | None = None) -> bool:
        """Whether the value is as the rule says; `before`: of the last iteration that counts.

        What is not a number is neither above nor below; an infinite value may be.
        """
        match self.condition:
            case "above":
                return value > self.threshold
            case "below":
                return value < self.threshold
            case "not_finite":
                return not math.isfinite(value)
        if before is None or not math.isfinite(value):
            return False
        return abs(value - before) > self.threshold * max(abs(before), SMALLEST_CHANGE)

    @property
    def when(self) -> str:
        """The condition in words."""
        words = {
            "above": f"above {self.threshold:g}",
            "below": f"below {self.threshold:g}",
            "not_finite": "not finite",
            "change": f"changed by more than {100 * self.threshold:g} %",
        }[self.condition]
        return words + (f" for {self.for_steps} steps" if self.for_steps > 1 else "")

    def __str__(self) -> str:
        return f"{self.metric} {self.when}: {', '.join(map(str, self.actions))}"

    @property
    def names(self) -> set[str]:
        """The names of its actions."""
        return {action.name for action in self.actions}

    @property
    def is_of_mini_batch(self) -> bool:
        """Whether it is decided at every mini-batch, before the optimizer step."""
        if self.condition == "change":
            return False
        return self.metric in UPDATE_METRICS or (
            self.metric == MEMORY and "halve_budget" in self.names
        )

    @property
    def is_of_batch(self) -> bool:
        """Whether it is decided once, before the updates of an iteration."""
        return self.metric in BATCH_METRICS and "skip_update" in self.names

    @property
    def model(self) -> str:
        """Whose learning rate and budget its actions change."""
        own = ("critic/vf_", "critic/vpred", "critic/values", "critic/grad_norm", "critic/lr")
        return "critic" if self.metric.startswith(own) else "actor"


FIRES_WINDOW = 20
"""iterations within which the fires of a rule are counted"""
SMALLEST_CHANGE = 1e-3
"""of a value near 0, that a change is a share of"""
_KEYS = ("metric", *get_args(Condition), "for_steps", "action", "max_fires")


def parse_rule(raw: Mapping[str, Any], *, max_fires: int) -> Rule:
    """The rule {metric, above | below | not_finite | change, for_steps, action, max_fires}.

    `action` is one text or several: a name, and a number behind those that take one. `max_fires`
    is what a rule has whose actions count and that does not say it itself.

    Raises ValueError: what is wrong with it, and how it would be right.
    """
    unknown = sorted(set(raw) - set(_KEYS))
    if unknown:
        raise ValueError(f"{unknown[0]} is no key of a rule, which are {', '.join(_KEYS)}")
    if not isinstance(raw.get("metric"), str) or not raw["metric"][:1].isalpha():
        raise ValueError("needs metric: a name of ppo/README.md's table")
    given: list[Condition] = [name for name in get_args(Condition) if name in raw]
    if len(given) != 1:
        raise ValueError(f"needs one of {', '.join(get_args(Condition))}")
    condition, threshold = given[0], raw[given[0]]
    if condition == "not_finite":
        if threshold is not True:
            raise ValueError("not_finite is true, or left out")
        threshold = 0.0
    elif not _is_number(threshold) or (condition == "change" and threshold <= 0):
        raise ValueError(f"{condition} needs a number" + " above 0" * (condition == "change"))
    for_steps, limit = raw.get("for_steps", 1), raw.get("max_fires", max_fires)
    for name, value in (("for_steps", for_steps), ("max_fires", limit)):
        if not (type(value) is int and value >= 1) and not (name in raw and value is None):
            raise ValueError(f"{name} is a whole number of at least 1")
    actions = raw.get("action")
    texts = actions if isinstance(actions, list) and actions else [actions]
    parsed = tuple(_parse_action(text) for text in texts)
    _check_together([action.name for action in parsed])
    counts = any(ACTIONS[action.name].counts for action in parsed)
    rule = Rule(
        metric=raw["metric"],
        condition=condition,
        threshold=float(threshold),
        for_steps=for_steps or 1,
        actions=parsed,
        max_fires=limit if counts or "max_fires" in raw else None,
    )
    _check_time(rule)
    return rule


def _parse_action(text: Any) -> Action:
    words = re.split(r"[\s:=]+", text.strip()) if isinstance(text, str) else []
    if not words or words[0] not in ACTIONS:
        raise ValueError(f"action is one or several of {', '.join(ACTIONS)}, not {text!r}")
    traits = ACTIONS[words[0]]
    if not traits.number:
        if len(words) > 1:
            raise ValueError(f"{words[0]} takes no number")
        return Action(words[0])
    try:
        number = float(words[1])
    except (IndexError, ValueError):
        number = math.nan
    if len(words) != 2 or not 0 < number <= traits.most:
        raise ValueError(
            f"{words[0]} needs {traits.number} behind it, above 0 and at most {traits.most:g}: "
            f"{words[0]} {traits.example}"
        )
    return Action(words[0], number)


def _check_together(names: list[str]) -> None:
    """One rule does each thing once, and leaves one learning rate."""
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"{twice[0]} stands twice in action")
    if {"scale_lr", "set_lr"} <= set(names):
        raise ValueError("action has scale_lr and set_lr, and the last would win: leave one out")


def _check_time(rule: Rule) -> None:
    """What has to be decided before an optimizer step needs a metric that is known there."""
    for name in ("stop_epoch", "halve_budget"):
        if name in rule.names and not rule.is_of_mini_batch:
            raise ValueError(
                f"{name} is decided at each mini-batch: metric must be one of "
                f"{', '.join(UPDATE_METRICS)}, and the condition no change"
            )
    if "skip_update" in rule.names and not (
        rule.is_of_mini_batch or (rule.is_of_batch and rule.condition != "change")
    ):
        raise ValueError(
            "skip_update is decided before an update: metric must be one of "
            f"{', '.join(UPDATE_METRICS + BATCH_METRICS)}, and the condition no change"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class GuardsConfig(Section):
    """What is done when a number goes wrong."""

    preset: Preset = "default"
    """default: an update that is not finite is left out, token budgets are halved above
    memory_fraction, an iteration's update stops above 1.5 x target_ppo_kl. strict: besides, limits
    of KL, reward swings and gradients, with rollbacks. none: the rules below alone; an update whose
    gradient is not finite is left out all the same"""
    rules: list[dict[str, Any]] = field(default_factory=list)
    """further rules: {metric: NAME, above | below | change: X or not_finite: true, for_steps: 1,
    action: one or several of warn, stop_epoch, skip_update, halve_budget, scale_lr F, set_lr LR,
    scale_kl_coef F, rollback, reset_critic, abort}; README has a table"""
    memory_fraction: Share = 0.92
    """share of a device's memory that tensors may hold in a mini-batch"""
    target_ppo_kl: Positive = 0.1
    """actor/ppo_kl_k3 that an iteration may reach; two thirds of where it stops"""
    max_fires: PositiveInt = 3
    """within 20 iterations, of one rule that leaves out, undoes or changes something: one more ends
    the run"""

    def preset_rules(self) -> list[dict[str, Any]]:
        """What the preset stands for, as it would be written."""
        if self.preset == "none":
            return []
        losses = ("actor/pg_loss", "critic/vf_loss")
        norms = ("actor/grad_norm", "critic/grad_norm")
        kl, stop = "actor/ppo_kl_k3", 1.5 * self.target_ppo_kl
        rules: list[dict[str, Any]] = [
            *({"metric": m, "not_finite": True, "action": "skip_update"} for m in losses + norms),
            {"metric": MEMORY, "above": self.memory_fraction, "action": "halve_budget"},
            {"metric": kl, "above": stop, "action": "stop_epoch"},
        ]
        if self.preset == "strict":
            swing = ["scale_lr 0.5", "rollback"]
            rules += [
                {"metric": kl, "above": 1.0, "action": ["stop_epoch", "rollback"]},
                {"metric": "actor/ref_kl", "above": 0.05, "action": "scale_kl_coef 1.5"},
                {"metric": "actor/ref_kl", "above": 0.1, "action": "skip_update"},
                {"metric": "actor/ref_kl", "above": 0.2, "action": "set_lr 1e-6"},
                {"metric": "critic/score/mean", "change": 0.2, "action": swing},
                *({"metric": m, "not_finite": True, "action": "halve_budget"} for m in losses),
                *({"metric": m, "above": 1e4, "action": "skip_update"} for m in norms),
                {"metric": losses[1], "not_finite": True, "action": "reset_critic"},
            ]
        return rules

    def all_rules(self) -> list[Rule]:
        """The preset's rules and the further ones. Raises ValueError."""
        raw = [*self.preset_rules(), *self.rules]
        return [parse_rule(rule, max_fires=self.max_fires) for rule in raw]
