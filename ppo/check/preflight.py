"""`--check`: what a run would be, without processes, data or weights.

Prints the mesh, the batch arithmetic and the predicted peak memory of a rank in each phase, or
every problem found; the last line says whether it fits. Must not import torch, transformers or
sglang: it answers in seconds.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ppo.check.describe import batch_lines, count, memory_lines, mesh_lines, verdict
from ppo.check.files import (
    is_hub_name,
    missing_files,
    overlong_prompts,
    to_download,
    wrong_contents,
)
from ppo.check.fits import cache_fits, too_large
from ppo.check.memory_phases import GIB, Phase, Plan, kv_cache, kv_context, phases
from ppo.check.remedies import remedy
from ppo.check.rules import check_config
from ppo.check.shard_size import sized
from ppo.check.training_rows import row_problems
from ppo.check.warnings import config_warnings
from ppo.config import (
    CommandLine,
    Config,
    ConfigError,
    ModelRole,
    Problem,
    load_config,
    with_values,
)
from ppo.model_shapes import ModelShape, find_shape
from sharding.dims import ParallelDims


class Models(NamedTuple):
    """What is known of the models of a run."""

    shapes: dict[str, ModelShape]
    """by the name of the model"""
    lines: list[str]
    problems: list[Problem]
    """a config.json that is none"""


def run_check(options: CommandLine) -> int:
    """All of `--check`: loads the file, prints the plan or every problem; returns the exit code."""

    file = options.model_config
    try:
        config = load_config(
            options.config, options.overrides, check=lambda config: problems_of(config, file)
        )
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    gib = smallest_gpu() if options.as_here and config.trainer.device != "cpu" else None
    said = config.check.device_memory_gib
    if gib is not None and not NOMINAL * said <= gib <= said:
        sys.stdout.write(f"device memory: {gib:g} GiB, of the smallest GPU that CUDA shows here\n")
        config = with_values(config, {"check.device_memory_gib": gib})
    return report(config, verbose=options.verbose, model_config=file)


NOMINAL = 0.97
"""a card of 80 GB shows 79.1 GiB: a configuration that says 80, and leaves HEADROOM, means it"""


def smallest_gpu() -> float | None:
    """GiB of the smallest GPU that CUDA shows this process, as torch would see it (so that
    CUDA_VISIBLE_DEVICES and MIG count); None where it shows none.

    Asked of the driver, without a context: nothing is held on a GPU.
    """
    count = ctypes.c_int(0)
    sizes: list[int] = []
    with suppress(OSError, AttributeError):  # no driver, or another kind of library
        cuda = ctypes.CDLL("libcuda.so.1")
        if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return None
        for index in range(count.value):
            device, size = ctypes.c_int(0), ctypes.c_size_t(0)
            failed = cuda.cuDeviceGet(ctypes.byref(device), index)
            if failed or cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device):
                return None
            sizes.append(size.value)
    return round(min(sizes) / GIB, 2) if sizes else None


def problems_of(config: Config, model_config: Path | None = None) -> list[Problem]:
    """What cannot work on the machine of `check`, and what is wrong in files that are here."""
    ranks = config.check.nproc_per_node
    world_size = ranks * config.check.nnodes
    return [
        *check_config(config, world_size=world_size, ranks_per_node=ranks),
        *wrong_contents(config, model_config),
        *row_problems(config),
    ]


def report(config: Config, *, verbose: bool, model_config: Path | None = None) -> int:
    """Print the plan for the machine of `check`; 0 when it works and fits, else 2 and problems.

    The rules of ppo/check/rules.py hold already.
    """
    ranks = config.check.nproc_per_node
    world_size = ranks * config.check.nnodes
    models = find_models(config, model_config)
    dims, plan, reason, held = config.dims(world_size, ranks), None, "", None
    if models.shapes.keys() == config.models.keys():
        plan, reason = sized(plan_of(config, dims, models.shapes))
        dims, held = plan.dims, kv_cache(plan).sequences
    problems = [*models.problems, *check_shapes(config, models.shapes, dims)]
    lines = [*mesh_lines(config, dims, reason), *batch_lines(config, dims, held=held)]
    lines += models.lines
    last = "memory: not checked"
    if plan is not None:
        predicted = phases(plan)
        lines += memory_lines(plan, predicted, verbose=verbose)
        last = verdict(plan, predicted)
        if not problems:
            problems += _not_fitting(plan, predicted)
    missing = [*missing_files(config), *to_download(config)]
    if missing:
        absent = (f"  {problem.path}: {problem.value} ({problem.rule})" for problem in missing)
        lines += ["not checked, absent here", *absent]
    notes = [*config_warnings(config, world_size=world_size), *overlong_prompts(config)]
    if notes:
        lines += ["warnings", *(f"  {note}" for note in notes)]
    sys.stdout.write("\n".join([*lines, last]) + "\n")
    if problems:
        sys.stdout.flush()
        sys.stderr.write(f"{ConfigError(problems)}\n")
        return 2
    return 0


def find_models(config: Config, model_config: Path | None = None) -> Models:
    """The sizes of the models, as far as they are known here; of model.path from `model_config`."""
    models = Models({}, [], [])
    for role in config.models.values():
        try:
            is_given = role.path == config.model.path
            found = find_shape(role.path, model_config if is_given else None)
        except ValueError as error:
            models.problems.append(Problem(role.path_key, role.path, str(error)))
            continue
        if found is None:
            models.lines.extend(_unknown(role) if not _is_the_actors(role, config) else ())
            continue
        models.shapes[role.name], source = found
        of_lm = f", {count(found[0].num_params)} parameters" if role.has_logits else ""
        if not _is_the_actors(role, config):
            models.lines.append(f"{role.name}: {role.path}{of_lm} ({source})")
        if role.lora is not None:
            shape, keys = found[0], (role.lora.target_modules, role.lora.exclude_modules)
            number = shape.num_layers * sum(shape.lora_size(role.lora.rank, *keys))
            models.lines.append(
                f"  trained: adapters of rank {role.lora.rank}, about {count(number)} parameters"
            )
    return models


def _is_the_actors(role: ModelRole, config: Config) -> bool:
    """Whether it is the reference, and the model that training begins with."""
    return role.name == "ref" and role.path == config.model.path


def _unknown(role: ModelRole) -> Iterator[str]:
    """What to do about a model whose sizes are not known here."""
    yield f"{role.name}: {role.path}: its sizes are not known here, so memory is not checked"
    yield f"  next: {how_to_know(role.path)}"


def how_to_know(path: str) -> str:
    """What makes the sizes of a model known here."""
    elsewhere = "or name it with --model_config, or add its sizes to configs/model_shapes.yaml"
    if is_hub_name(path):
        return f"hf download {path} config.json (a few kB), {elsewhere}"
    return f"put its config.json (a few kB) at {path}/config.json, {elsewhere}"


def plan_of(config: Config, dims: ParallelDims, shapes: dict[str, ModelShape]) -> Plan:
    """What memory is predicted from, on the device that `check` describes."""
    return Plan(
        config=config,
        dims=dims,
        shapes=shapes,
        cuda=config.trainer.device != "cpu",
        device_bytes=config.check.device_memory_gib * GIB,
    )


def check_shapes(
    config: Config, shapes: dict[str, ModelShape], dims: ParallelDims
) -> list[Problem]:
    """Degrees that the attention heads of the models do not allow; unknown models pass."""
    found = []
    keys: dict[str, str] = {}
    for role in config.models.values():
        if role.name in shapes and role.path not in keys:  # wrong once, not in each role
            keys[role.path] = role.path_key
            found += _head_problems(role, shapes[role.name], dims)
    return found


def _head_problems(role: ModelRole, shape: ModelShape, dims: ParallelDims) -> Iterator[Problem]:
    degrees = {"actor.ulysses_sequence_parallel_size": dims.sp}
    if role.path_key == "model.path":
        degrees["rollout.tensor_model_parallel_size"] = dims.rollout_tp
    for name, degree in degrees.items():
        if degree not in shape.degrees:
            heads = f"{shape.num_heads} attention and {shape.num_kv_heads} kv heads"
            yield Problem(
                name,
                degree,
                f"does not divide the {heads} of {role.path_key} = {role.path}",
                f"possible: {', '.join(map(str, shape.degrees))}",
            )


def _not_fitting(plan: Plan, found: list[Phase]) -> list[Problem]:
    """Phases that need more than there is; the first says what would help all of them."""
    problems = [
        Problem(
            "check.device_memory_gib",
            round(plan.device_bytes / GIB, 3),
            f"{phase.name} needs {phase.bytes / GIB:.2f} GiB per rank, of which "
            f"{plan.usable_bytes / GIB:.2f} are usable, most of it "
            f"{(largest := max(phase.items, key=lambda item: item.bytes)).name} "
            f"({largest.bytes / GIB:.2f})",
        )
        for phase in too_large(plan, found)
    ]
    if not cache_fits(plan):
        problems.append(
            Problem(
                "rollout.gpu_memory_utilization",
                plan.config.rollout.gpu_memory_utilization,
                f"leaves a KV cache of {kv_cache(plan).tokens} tokens, less than one sequence of "
                f"{kv_context(plan)} (rollout.max_model_len = {plan.config.rollout.max_model_len})",
            )
        )
    if problems:
        problems[0] = problems[0]._replace(fix=remedy(plan))
    return problems
