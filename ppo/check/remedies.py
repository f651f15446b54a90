"""What would make a plan fit: settings that are tried on the plan itself, so that advice is true.

Owns which settings trade time for memory, in the order in which one would try them. Pure numbers:
no file, no process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ppo.check.fits import UTILIZATION, fits
from ppo.check.memory_pass import ITEM_BYTES
from ppo.check.memory_phases import Plan, engine_weights, kv_context, phases
from ppo.check.shard_size import sized
from ppo.config import values_of, with_values
from ppo.model_shapes import KV_PAGE, STATES_PER_SEQUENCE
from sharding.dims import divisors

Settings = Mapping[str, Any]
"""values by dotted key"""
MOST_RANKS = 1024
SHARD_SIZE = "actor.fsdp.fsdp_size"
ACTIVATION_OFFLOAD: Settings = {
    "model.checkpoint_policy": "full",
    "model.enable_activation_offload": True,
}
MLP_ROWS = 2048
"""that an MLP sees at once, where all that a rank has are too many"""


def remedy(plan: Plan) -> str:
    """What makes all phases fit: few settings that are not made yet, else more ranks."""
    if found := settings_that_fit(plan):
        return f"it fits with {_in_words(plan, found)}"
    ranks = plan.dims.world_size
    while (ranks := ranks * 2) <= MOST_RANKS:
        larger_plan = on_ranks(plan, ranks)
        for settings in ({}, _together(_ladder(larger_plan))):
            if (found := _that_fits(larger_plan, settings)) is not None:
                more = f" with {_in_words(plan, found)}" if found else ""
                return f"it fits on {ranks} ranks{more}"
    return "it fits on no number of ranks: take a smaller model, or shorter sequences"


def settings_that_fit(plan: Plan) -> Settings | None:
    """Few settings with which all phases fit; none where they do as it is, None where none help.

    Each step of the ladder is tried alone, then with all cheaper ones, of which those that are not
    needed are left out again.
    """
    ladder = _ladder(plan)
    tries = [t for k, step in enumerate(ladder, 1) for t in (step, _together(ladder[:k]))]
    found = (_that_fits(plan, settings) for settings in ({}, *tries))
    return next((settings for settings in found if settings is not None), None)


def _ladder(plan: Plan) -> list[Settings]:
    """Settings that take memory off the device, from the cheapest, but for those that are made."""
    made = values_of(plan.config)
    ladder: list[Settings] = [
        *_recomputing(plan),
        *_larger_groups(plan),
        *_budgets(plan),
        *({"rollout.tensor_model_parallel_size": n} for n in larger(plan, plan.dims.rollout_tp)),
        *offloads(plan),
        ACTIVATION_OFFLOAD,
        {"model.mlp_block_rows": MLP_ROWS},
        *({"actor.ulysses_sequence_parallel_size": n} for n in larger(plan, plan.dims.sp)),
    ]
    return [step for step in ladder if any(made[key] != value for key, value in step.items())]


def offloads(plan: Plan) -> list[Settings]:
    """What of the trained models may rest on the host, from what costs the least time."""
    trained = [role.section for role in plan.config.models.values() if role.is_trained]
    optimizer = {f"{name}.fsdp.optimizer_offload": True for name in trained}
    param = {f"{name}.fsdp.param_offload": True for name in trained}
    on_host = {f"{name}.fsdp.optimizer_on_host": True for name in trained}
    policy = {f"{name}.fsdp.offload_policy": True for name in trained}
    no_optimizer = dict.fromkeys(optimizer, False)
    no_other = dict.fromkeys((*optimizer, *param, *on_host), False)
    return [
        optimizer,
        {**optimizer, **param},
        {**on_host, **param, **no_optimizer},
        {**policy, **no_other},
    ]


def _recomputing(plan: Plan) -> list[Settings]:
    """What layers may keep less, from what costs the least time."""
    order = ["none", "selective", "full"]
    rest = order[order.index(plan.config.model.policy) + 1 :]
    on = {"model.enable_gradient_checkpointing": True}
    return [{**on, "model.checkpoint_policy": policy} for policy in rest]


def _larger_groups(plan: Plan) -> Iterator[Settings]:
    """More ranks that share the parameters: bytes over the network instead of bytes held."""
    dims, strategy = plan.dims, plan.config.actor.fsdp.sharding_strategy
    size, wanted = SHARD_SIZE, "actor.fsdp.sharding_strategy"
    if strategy in (None, "HYBRID_SHARD"):
        for n in divisors(dims.world_size)[:-1]:
            if n > dims.shard_size and n % dims.sp == 0:
                yield {size: n}
    if strategy is not None:
        yield {wanted: "FULL_SHARD", size: -1}
    elif dims.shard_size < dims.world_size:
        yield {size: dims.world_size}


def larger(plan: Plan, degree: int) -> list[int]:
    """Larger degrees than this one that heads and ranks of a node allow."""
    ranks = plan.dims.ranks_per_node
    return [n for n in plan.actor.degrees if n > degree and ranks % n == 0]


def _budgets(plan: Plan) -> Iterator[Settings]:
    """Half the tokens or sequences of a pass, a quarter, ..., down to one sequence."""
    config, longest = plan.config, -(-plan.config.data.max_length // plan.dims.sp)
    tokens = {"ref.log_prob_max_token_len_per_gpu": config.ref.log_prob_max_token_len_per_gpu}
    if "reward model" in config.models:
        key = "reward.model.max_token_len_per_gpu"
        tokens[key] = config.reward.model.max_token_len_per_gpu
    sequences = {}
    for name in ("actor", "critic"):
        section = getattr(config, name)
        if name in config.models and section.use_dynamic_bsz:
            tokens[f"{name}.ppo_max_token_len_per_gpu"] = section.ppo_max_token_len_per_gpu
        elif name in config.models:
            sequences[f"{name}.ppo_micro_batch_size_per_gpu"] = 1
    parts = 2
    while any(budget * 2 > longest * parts for budget in tokens.values()):
        yield {
            **{key: min(now, max(now // parts, longest)) for key, now in tokens.items()},
            **sequences,
        }
        parts *= 2


def _together(steps: list[Settings]) -> Settings:
    """All of them; a later one wins over an earlier one."""
    return {key: value for step in steps for key, value in step.items()}


def _that_fits(plan: Plan, settings: Settings) -> Settings | None:
    """Those of the settings that it needs to fit, and another share for the engine if need be."""
    tried = changed(plan, settings)
    if tried.dims.problems():
        return None
    if not fits(tried) and (share := _engine_share(tried)) is not None:
        settings = {**settings, UTILIZATION: share}
        tried = changed(plan, settings)
    if not fits(tried):
        return None
    for key in reversed(list(settings)):
        fewer = {name: value for name, value in settings.items() if name != key}
        if fits(changed(plan, fewer)):
            settings = fewer
    sizes = (n for n in divisors(settings.get(SHARD_SIZE, 0)) if n > plan.dims.shard_size)
    smallest_first = ({**settings, SHARD_SIZE: n} for n in sizes)
    return next((each for each in smallest_first if fits(changed(plan, each))), settings)


def _engine_share(plan: Plan) -> float | None:
    """gpu_memory_utilization with which the engine's phases fit, or which holds one sequence."""
    found, device = {phase.name: phase.bytes for phase in phases(plan)}, plan.device_bytes
    over = max(found["reshard"], found["generate"]) - plan.usable_bytes
    if over > 0:
        wanted = math.floor(100 * (plan.config.rollout.gpu_memory_utilization - over / device))
    else:
        return share_of_engine(plan, kv_context(plan))
    return wanted / 100 if 1 <= wanted < 100 else None


def share_of_engine(plan: Plan, tokens: int) -> float | None:
    """gpu_memory_utilization whose cache holds so many tokens; None where none does."""
    itemsize, tp = ITEM_BYTES[plan.config.rollout.dtype], plan.dims.rollout_tp
    cache = (tokens + KV_PAGE) * plan.actor.kv_bytes_per_token(tp=tp, itemsize=itemsize)
    held = plan.config.rollout.max_num_seqs or math.ceil(4 * tokens / kv_context(plan))
    states = (STATES_PER_SEQUENCE * held + 1) * plan.actor.states.bytes_of(tp)
    wanted = math.ceil(100 * (engine_weights(plan) + cache + states) / plan.device_bytes)
    return wanted / 100 if 1 <= wanted < 100 else None


def changed(plan: Plan, settings: Settings) -> Plan:
    """The plan with these settings; shard groups that are left open have a size."""
    return on_ranks(replace(plan, config=with_values(plan.config, settings)), plan.dims.world_size)


def on_ranks(plan: Plan, ranks: int) -> Plan:
    """The same on more ranks: nodes of eight, unless they are larger."""
    per_node = plan.dims.ranks_per_node
    if ranks > plan.dims.world_size:
        per_node = max(per_node, min(8, ranks))
    return sized(replace(plan, dims=plan.config.dims(ranks, per_node))).plan


def _in_words(plan: Plan, settings: Settings) -> str:
    """The settings as overrides, but for those that are made already."""
    made = values_of(plan.config)
    return " ".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in settings.items()
        if made[key] != value
    )
