"""Whether a plan fits, and the largest budgets with which it does: the one rule of all advice.

Owns the rule that `--check`, `--suggest`, the choice of a shard size and the README's table share.
Pure numbers: no file, no process.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ppo.check.memory_phases import Phase, Plan, kv_cache, kv_context, phases
from ppo.config import with_values

UTILIZATION = "rollout.gpu_memory_utilization"
BUDGETS = {
    "actor": "actor.ppo_max_token_len_per_gpu",
    "critic": "critic.ppo_max_token_len_per_gpu",
}
MOST_PERCENT = 95
"""of a device for the engine"""


class Largest(NamedTuple):
    """The largest value of a key with which every phase fits; None where none does."""

    key: str
    value: int | float | None
    tokens: int
    """of a budget those beyond which more has no effect, of an engine's share those it holds"""


def fits(plan: Plan) -> bool:
    """Whether every phase fits on the device, and one sequence into the engine."""
    return not plan.dims.problems() and cache_fits(plan) and phases_fit(plan)


def phases_fit(plan: Plan) -> bool:
    """Whether every phase fits on the device."""
    return not too_large(plan, phases(plan))


def too_large(plan: Plan, found: list[Phase]) -> list[Phase]:
    """Of the phases those that need more than is usable."""
    return [phase for phase in found if phase.bytes > plan.usable_bytes]


def cache_fits(plan: Plan) -> bool:
    """Whether the engine's KV cache holds one sequence."""
    return kv_cache(plan).tokens >= kv_context(plan)


def largest_budgets(plan: Plan) -> list[Largest]:
    """Of each model that is trained by tokens: the most that a rank can compute at once, by the
    phase in which it is trained."""
    found = []
    for name, key in BUDGETS.items():
        section = getattr(plan.config, name)
        if name not in plan.config.models or not section.use_dynamic_bsz:
            continue
        longest = -(-plan.config.data.max_length // plan.dims.sp)
        rows = -(-section.ppo_mini_batch_size * plan.config.rollout.n // plan.dims.dp)
        most = max(rows, 1) * longest  # a mini-batch's tokens on a rank
        value = _largest(partial(_trains, plan, name, key), longest, most)
        found.append(Largest(key, value, most))
    return found


def largest_cache(plan: Plan) -> Largest | None:
    """The engine's share with the largest KV cache while every phase fits; None where none is."""
    percent = _largest(lambda n: phases_fit(_with(plan, {UTILIZATION: n / 100})), 1, MOST_PERCENT)
    if percent is None:
        return None
    best = _with(plan, {UTILIZATION: percent / 100})
    return Largest(UTILIZATION, percent / 100, kv_cache(best).tokens) if cache_fits(best) else None


def _largest(works: Callable[[int], bool], least: int, most: int) -> int | None:
    """The largest number of least to most that works, if those below one that works do too."""
    found = bisect_right(range(least, most + 1), 0, key=lambda n: int(not works(n)))
    return least + found - 1 if found else None


def _trains(plan: Plan, name: str, key: str, value: int) -> bool:
    """Whether the update of one model fits with this budget."""
    tried = _with(plan, {key: value})
    return all(phase.name != f"train {name}" for phase in too_large(tried, phases(tried)))


def _with(plan: Plan, settings: Mapping[str, Any]) -> Plan:
    """The plan with settings that leave the mesh as it is."""
    return replace(plan, config=with_values(plan.config, settings))
