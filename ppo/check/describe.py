"""`--check` in lines: the mesh, the batch arithmetic, the predicted memory of each phase.

Owns how a plan is shown. Must not decide what is right or wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

from ppo.check.fits import largest_budgets, largest_cache, too_large
from ppo.check.memory_pass import Item, Kind
from ppo.check.memory_phases import GIB, HEADROOM, Phase, Plan, host_bytes, kv_cache
from ppo.config import ActorConfig, Config, CriticConfig
from sharding.dims import ParallelDims


def mesh_lines(config: Config, dims: ParallelDims, reason: str) -> Iterator[str]:
    """The meshes of training and generation; why shard groups are as large as they are."""
    nodes, ranks = _plural(dims.nodes, "node"), _plural(dims.ranks_per_node, "rank")
    yield f"mesh: {nodes} x {ranks}"
    strategy = dims.strategy
    if not config.actor.fsdp.reshards and strategy == "FULL_SHARD":
        strategy = "SHARD_GRAD_OP"
    yield (
        f"  training    dp_replicate {dims.dp_replicate} x dp_shard {dims.dp_shard} x sp {dims.sp}"
        f"   {strategy}, shards over {dims.shard_size} ranks"
    )
    if reason:
        yield f"    {reason}"
    yield (
        f"  generation  rollout_dp {dims.rollout_dp} x rollout_tp {dims.rollout_tp}"
        f"   engine {config.planned_engine}"
    )


def batch_lines(config: Config, dims: ParallelDims, *, held: int | None = None) -> Iterator[str]:
    """What an iteration and the run consist of.

    held: sequences that an engine has at once, where the model's sizes tell.
    """
    prompts, n = config.data.train_batch_size, config.rollout.n
    longest = config.data.max_length
    yield "one iteration"
    yield (
        f"  {prompts} prompts x {n} responses = {prompts * n} sequences of up to {longest} tokens "
        f"({count(prompts * n * longest)} tokens)"
    )
    groups = config.algorithm.filter_groups
    if groups.enable:
        drawn, most = config.data.gen_batch_size, groups.max_num_gen_batches
        limit = f", {_plural(most, 'round')} at most" if most else ""
        yield f"  whose {groups.metric or 'score'} differs, from rounds of {drawn} prompts{limit}"
        prompts = drawn
    replica = -(-prompts * n // dims.rollout_dp)
    held = held or config.rollout.max_num_seqs
    at_once = f", {min(replica, held)} at once" if held else ""
    yield f"  generation: {replica} sequences per engine{at_once}"
    yield from _updates("actor", config.actor, config, dims)
    if config.critic_enabled:
        yield from _updates("critic", config.critic, config, dims)
    steps = config.trainer.total_training_steps
    epochs = f"{_plural(config.trainer.total_epochs, 'epoch')} of the data"
    length = _plural(steps, "iteration") if steps else epochs
    yield f"  run: {length}"


def _updates(
    name: str, section: ActorConfig | CriticConfig, config: Config, dims: ParallelDims
) -> Iterator[str]:
    mini = config.data.train_batch_size // section.ppo_mini_batch_size
    sequences = section.ppo_mini_batch_size * config.rollout.n
    longest = config.data.max_length
    group = -(-sequences // dims.dp)
    yield (
        f"  {name}: {_plural(mini, 'mini-batch')} of {section.ppo_mini_batch_size} prompts "
        f"({sequences} sequences, about {group} per sp group) x "
        f"{_plural(section.ppo_epochs, 'epoch')} = "
        f"{_plural(mini * section.ppo_epochs, 'optimizer step')}"
    )
    if section.use_dynamic_bsz:
        row = section.ppo_max_token_len_per_gpu * dims.sp
        most = group if row < longest else math.ceil(group / (row // longest))
        yield (
            f"    token budget {section.ppo_max_token_len_per_gpu} per rank x sp {dims.sp} = {row} "
            f"per row: at most about {_plural(most, 'micro-batch')} per mini-batch"
        )
    else:
        size = min(section.ppo_micro_batch_size_per_gpu or group, group)
        yield (
            f"    micro-batches of {_plural(size, 'sequence')}: "
            f"about {math.ceil(group / size)} per mini-batch"
        )


def memory_lines(plan: Plan, found: list[Phase], *, verbose: bool) -> Iterator[str]:
    """Each phase by kinds of items, every item if verbose; what would fit; the host."""
    limit, there = plan.usable_bytes, f"{plan.device_bytes / GIB:g} GiB there"
    where = "device" if plan.cuda else "CPU, live tensors"
    if limit < plan.device_bytes:
        there += f", {limit / GIB:g} GiB usable: {HEADROOM:.0%} are headroom"
    yield f"predicted peak memory per rank ({where}; {there})"
    yield from _table(plan, found)
    for phase in found if verbose else []:
        yield f"  {phase.name}"
        yield from (_line(item) for item in sorted(phase.items, key=lambda item: -item.bytes))
    yield from _room(plan)
    yield from _host(plan)


def _table(plan: Plan, found: list[Phase]) -> Iterator[str]:
    """A line for each phase, a column for each kind of item that there is."""
    wrong = too_large(plan, found)
    kinds = [k for k in get_args(Kind) if any(item.kind == k for p in found for item in p.items)]
    widths = [max(len(kind), 7) for kind in kinds]
    unit, name = (GIB, "GiB") if max(phase.bytes for phase in found) >= GIB else (1 << 20, "MiB")
    head = "  ".join(f"{kind:>{width}}" for kind, width in zip(kinds, widths, strict=True))
    yield f"  {name:<13}{'all':>9}  {head}"
    for phase in found:
        sizes = [sum(item.bytes for item in phase.items if item.kind == kind) for kind in kinds]
        cells = "  ".join(
            f"{size / unit:>{width}.2f}" if size else f"{'-':>{width}}"
            for size, width in zip(sizes, widths, strict=True)
        )
        verdict = "DOES NOT FIT" if phase in wrong else "fits"
        yield f"  {phase.name:<13}{phase.bytes / unit:>9.2f}  {cells}  {verdict}"


def _room(plan: Plan) -> Iterator[str]:
    """The engine's cache, and the largest budgets with which every phase fits."""
    cache, longest = kv_cache(plan), plan.config.rollout.max_model_len
    yield (
        f"  KV cache: {cache.tokens} tokens ({_size(cache.bytes)}) per engine, "
        f"{cache.tokens // longest} sequences of {longest}"
    )
    best = largest_cache(plan)
    if best is not None and best.tokens > cache.tokens:
        yield f"    {best.tokens} tokens at most, with {best.key}={best.value}"
    for largest in largest_budgets(plan):
        if largest.value is None:
            yield f"  {largest.key}: none fits"
        elif largest.value >= largest.tokens:
            yield f"  {largest.key}: any fits, {largest.tokens} are a rank's whole mini-batch"
        else:
            yield f"  {largest.key}: {largest.value} at most"


def verdict(plan: Plan, found: list[Phase]) -> str:
    """Whether it fits, and by how much."""
    fullest = max(found, key=lambda phase: phase.bytes)
    left, usable = plan.usable_bytes - fullest.bytes, f"{plan.usable_bytes / GIB:g} usable GiB"
    if not too_large(plan, found):
        return f"fits: {_size(left)} of {usable} are left in the fullest phase, {fullest.name}"
    return f"does not fit: {fullest.name} needs {_size(-left)} more than the {usable}"


def _host(plan: Plan) -> Iterator[str]:
    items = host_bytes(plan)
    total = sum(item.bytes for item in items)
    yield f"host memory per node, besides processes and data: {_size(total)}"
    yield from (_line(item) for item in items)


def _line(item: Item) -> str:
    return f"    {_size(item.bytes):>11}  {item.name}"


def _size(number: float) -> str:
    return f"{number / GIB:.2f} GiB" if number >= GIB / 10 else f"{number / (1 << 20):.1f} MiB"


def _plural(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('batch') else 's'}"


def count(number: float) -> str:
    """A number in k, M or G."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(int(number))
