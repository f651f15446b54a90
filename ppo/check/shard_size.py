"""How many ranks share the parameters where the configuration leaves it open, by the memory plan.

Owns the choice and its reason. Pure numbers: the same sizes of models and devices give the same
answer in `--check` and on every rank of a run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ppo.check.fits import phases_fit, too_large
from ppo.check.memory_phases import GIB, Phase, Plan, phases
from sharding.dims import divisors


class Sized(NamedTuple):
    """A plan whose shard groups have a size, and why they have it; "" where it was not open."""

    plan: Plan
    reason: str


def sized(plan: Plan) -> Sized:
    """Choose fsdp_size -1 on several nodes: the ranks of a node, whose network is the fastest, or
    the smallest larger group with which every phase fits; all ranks where none does."""
    if not is_open(plan):
        return Sized(replace(plan, dims=plan.dims.resolve()), "")
    tries = [replace(plan, dims=replace(plan.dims, fsdp_size=n)) for n in _sizes(plan)]
    fullest = [max(phases(each), key=lambda phase: phase.bytes) for each in tries]
    fitting = (i for i, each in enumerate(tries) if phases_fit(each))
    chosen = next(fitting, len(tries) - 1)
    return Sized(tries[chosen], _reason(plan, tries[chosen].dims.fsdp_size, fullest))


def is_open(plan: Plan) -> bool:
    """Whether the plan may choose: no key and no strategy says the size, and there is a choice."""
    dims = plan.dims
    wrote = {role.fsdp.shard_size(dims.world_size) for role in plan.config.models.values()}
    return plan.cuda and dims.nodes > 1 and not dims.problems() and wrote == {-1}


def _sizes(plan: Plan) -> list[int]:
    """Groups of whole nodes, rising; a HYBRID_SHARD keeps at least two of them."""
    dims, wanted = plan.dims, plan.config.actor.fsdp.sharding_strategy
    most = dims.world_size // (2 if wanted == "HYBRID_SHARD" else 1)
    return [
        n
        for n in divisors(dims.world_size)
        if dims.ranks_per_node <= n <= most and n % dims.ranks_per_node == 0 and n % dims.sp == 0
    ]


def _reason(plan: Plan, size: int, fullest: list[Phase]) -> str:
    chosen = f"actor.fsdp.fsdp_size = -1 is {size} of {plan.dims.world_size} ranks: "
    if not too_large(plan, fullest[:1]):
        return f"{chosen}those of a node, where every phase fits"
    over = (fullest[0].bytes - plan.usable_bytes) / GIB
    missing = f"with the {plan.dims.ranks_per_node} of a node {fullest[0].name} needs {over:.2f} "
    rest = "the smallest larger group that fits"
    if too_large(plan, fullest[-1:]):
        rest = "no larger group fits either"
    return f"{chosen}{missing}GiB more than are usable; {rest}"
