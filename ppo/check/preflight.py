"""`--check`: what a run would be, without processes, data or weights.

Prints the mesh, the batch arithmetic and the predicted peak memory of a rank in each phase, or
every problem found. Must not import torch, transformers or sglang: it answers in seconds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

from ppo.check.files import missing_files, to_download
from ppo.check.memory_pass import Item
from ppo.check.memory_phases import (
    GIB,
    Phase,
    Plan,
    host_bytes,
    kv_cache,
    kv_context,
    micro_tokens,
    phases,
)
from ppo.check.rules import check_config
from ppo.check.warnings import config_warnings
from ppo.config import (
    ActorConfig,
    CommandLine,
    Config,
    ConfigError,
    CriticConfig,
    Problem,
    load_config,
)
from ppo.model_shapes import ModelShape, find_shape
from sharding.dims import ParallelDims

LARGEST = 5  # items shown of each phase


def run_check(options: CommandLine) -> int:
    """All of `--check`: loads the file, prints the plan or every problem; returns the exit code."""

    def rules(config: Config) -> list[Problem]:
        ranks = config.check.nproc_per_node
        world_size = ranks * config.check.nnodes
        return check_config(config, world_size=world_size, ranks_per_node=ranks)

    try:
        config = load_config(options.config, options.overrides, check=rules)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return report(config)


def report(config: Config) -> int:
    """Print the plan for the machine of `check`; 0 when it works and fits, else 2 and problems.

    The rules of ppo/check/rules.py hold already.
    """
    ranks = config.check.nproc_per_node
    world_size = ranks * config.check.nnodes
    dims = config.dims(world_size, ranks)
    more, problems = _models(config, dims)
    lines = [*_mesh(config, dims), *_batches(config, dims), *more]
    missing = [*missing_files(config), *to_download(config)]
    if missing:
        absent = (f"  {problem.path}: {problem.value} ({problem.rule})" for problem in missing)
        lines += ["not checked, absent here", *absent]
    notes = config_warnings(config, world_size=world_size)
    if notes:
        lines += ["warnings", *(f"  {note}" for note in notes)]
    sys.stdout.write("\n".join(lines) + "\n")
    if problems:
        sys.stdout.flush()
        sys.stderr.write(f"{ConfigError(problems)}\n")
        return 2
    return 0


def check_shapes(config: Config, dims: ParallelDims) -> list[Problem]:
    """Degrees that the attention heads of the models do not allow; unknown models pass."""
    found = []
    keys: dict[str, str] = {}
    for role in config.models.values():
        keys.setdefault(role.path, role.path_key)  # a model with two roles is wrong once
    for path, key in keys.items():
        if shape := find_shape(path):
            found += _head_problems(key, path, shape[0], dims)
    return found


def _head_problems(key: str, path: str, shape: ModelShape, dims: ParallelDims) -> Iterator[Problem]:
    degrees = {"actor.ulysses_sequence_parallel_size": dims.sp}
    if key == "model.path":
        degrees["rollout.tensor_model_parallel_size"] = dims.rollout_tp
    for name, degree in degrees.items():
        possible = [d for d in range(1, shape.num_heads + 1) if _divides(d, shape)]
        if degree not in possible:
            heads = f"{shape.num_heads} attention and {shape.num_kv_heads} kv heads"
            yield Problem(
                name,
                degree,
                f"does not divide the {heads} of {key} = {path}",
                f"possible: {', '.join(map(str, possible))}",
            )


def _divides(degree: int, shape: ModelShape) -> bool:
    """Heads are split; kv heads are split or repeated."""
    kv = shape.num_kv_heads
    return shape.num_heads % degree == 0 and (kv % degree == 0 or degree % kv == 0)


def _mesh(config: Config, dims: ParallelDims) -> Iterator[str]:
    nodes, ranks = _plural(dims.nodes, "node"), _plural(dims.ranks_per_node, "rank")
    yield f"mesh: {nodes} x {ranks}"
    strategy = dims.strategy
    if not config.actor.fsdp.reshard_after_forward and strategy == "FULL_SHARD":
        strategy = "SHARD_GRAD_OP"
    yield (
        f"  training    dp_replicate {dims.dp_replicate} x dp_shard {dims.dp_shard} x sp {dims.sp}"
        f"   {strategy}, shards over {dims.shard_size} ranks"
    )
    yield f"  generation  rollout_dp {dims.rollout_dp} x rollout_tp {dims.rollout_tp}"


def _batches(config: Config, dims: ParallelDims) -> Iterator[str]:
    prompts, n = config.data.train_batch_size, config.rollout.n
    longest = config.data.max_length
    yield "one iteration"
    yield (
        f"  {prompts} prompts x {n} responses = {prompts * n} sequences of up to {longest} tokens "
        f"({_count(prompts * n * longest)} tokens)"
    )
    replica = -(-prompts * n // dims.rollout_dp)
    yield (
        f"  generation: {replica} sequences per engine, "
        f"{min(replica, config.rollout.max_num_seqs)} at once"
    )
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


def _models(config: Config, dims: ParallelDims) -> tuple[list[str], list[Problem]]:
    """The models, and memory where their sizes are known."""
    shapes, lines = {}, []
    for role in config.models.values():
        found = find_shape(role.path)
        if found is None:
            return [f"memory: not checked, sizes of {role.path} are not known here"], []
        shapes[role.name], source = found
        count = f", {_count(found[0].num_params)} parameters" if role.name == "actor" else ""
        if role.name != "ref":  # it is the actor's
            lines.append(f"{role.name}: {role.path}{count} ({source})")
    cuda = config.trainer.device != "cpu"
    plan = Plan(
        config=config,
        dims=dims,
        shapes=shapes,
        cuda=cuda,
        sglang=config.rollout.engine == "sglang" or (config.rollout.engine == "auto" and cuda),
        device_bytes=config.check.device_memory_gib * GIB,
    )
    predicted = phases(plan)
    lines += [*_memory(plan, predicted), *_host(plan)]
    return lines, [*check_shapes(config, dims), *_not_fitting(plan, predicted)]


def _memory(plan: Plan, found: list[Phase]) -> Iterator[str]:
    limit = plan.device_bytes
    where = "device" if plan.cuda else "CPU, live tensors"
    yield f"predicted peak memory per rank ({where}; {limit / GIB:g} GiB there)"
    for phase in found:
        verdict = "fits" if phase.bytes <= limit else "DOES NOT FIT"
        yield f"  {phase.name:<13}{_size(phase.bytes):>11}  {verdict}"
        largest = sorted(phase.items, key=lambda item: -item.bytes)
        yield from (_line(item) for item in largest[:LARGEST])
        rest = sum(item.bytes for item in largest[LARGEST:])
        if rest:
            yield _line(Item("the rest", rest))
    tokens, size = kv_cache(plan)
    longest = plan.config.rollout.max_model_len
    yield (
        f"  KV cache: {tokens} tokens ({_size(size)}) per engine, "
        f"{tokens // longest} sequences of {longest}"
    )


def _host(plan: Plan) -> Iterator[str]:
    items = host_bytes(plan)
    total = sum(item.bytes for item in items)
    yield f"host memory per node, besides processes and data: {_size(total)}"
    yield from (_line(item) for item in items)


def _line(item: Item) -> str:
    return f"    {_size(item.bytes):>11}  {item.name}"


def _not_fitting(plan: Plan, found: list[Phase]) -> Iterator[Problem]:
    for phase in found:
        if phase.bytes > plan.device_bytes:
            largest = max(phase.items, key=lambda item: item.bytes)
            yield Problem(
                "check.device_memory_gib",
                round(plan.device_bytes / GIB, 3),
                f"{phase.name} needs {phase.bytes / GIB:.2f} GiB per rank, most of it "
                f"{largest.name} ({largest.bytes / GIB:.2f})",
                _advice(plan, phase, largest),
            )
    tokens, _ = kv_cache(plan)
    if tokens < kv_context(plan):
        yield Problem(
            "rollout.gpu_memory_utilization",
            plan.config.rollout.gpu_memory_utilization,
            f"leaves a KV cache of {tokens} tokens, less than one sequence of {kv_context(plan)} "
            f"(rollout.max_model_len = {plan.config.rollout.max_model_len})",
            "raise it, or rollout.tensor_model_parallel_size",
        )


def _advice(plan: Plan, phase: Phase, largest: Item) -> str:
    if phase.name == "reward model":
        return "lower reward.model.max_token_len_per_gpu, or use more ranks"
    name = "critic" if phase.name == "train critic" else "actor"
    if "tokens)" in largest.name or largest.name in (
        "one layer forward and backward",
        "log-probs in blocks",
    ):
        section = plan.config.critic if name == "critic" else plan.config.actor
        if micro_tokens(plan, section) * plan.dims.sp <= plan.config.data.max_length:
            return "a single sequence is that long: raise actor.ulysses_sequence_parallel_size"
        return (
            f"lower {name}.ppo_max_token_len_per_gpu, or raise actor.ulysses_sequence_parallel_size"
        )
    if phase.name in ("generate", "reshard"):
        return (
            "lower rollout.gpu_memory_utilization, raise rollout.tensor_model_parallel_size, or "
            "set actor.fsdp.optimizer_offload=true and param_offload=true"
        )
    return f"set {name}.fsdp.optimizer_offload=true and param_offload=true, or use more ranks"


def _size(number: float) -> str:
    return f"{number / GIB:.2f} GiB" if number >= GIB / 10 else f"{number / (1 << 20):.1f} MiB"


def _plural(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('batch') else 's'}"


def _count(number: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(int(number))
