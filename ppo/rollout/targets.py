"""What is evaluated: model.path, Hugging Face folders, adapters of peft, checkpoints of ours.

Owns what a path of --checkpoint means, and how its weights come into a model that is there already.
Must not know how it is sampled.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from ppo.config import Config, Lora, Problem
from ppo.errors import InputError
from ppo.models.build import reload_weights
from ppo.models.folder import read_generation_config
from ppo.models.hf_config import load_hf_config
from ppo.models.peft_folder import is_peft_folder, load_adapter, read_lora
from sharding.agree import together
from sharding.checkpoint import Checkpointer, CheckpointError
from sharding.checkpoint.files import step_of
from sharding.checkpoint.folder import candidates
from sharding.mesh import Mesh

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Target(NamedTuple):
    """One set of weights."""

    label: str
    """tells it from the others: in the table, in names of files"""
    step: int | None
    """of the run; None = nobody knows, or it is not read yet"""
    path: Path | None
    """None: the model as it is built"""

    @property
    def is_hf(self) -> bool:
        """Whether it is a Hugging Face folder."""
        return self.path is not None and is_hf_folder(self.path)

    @property
    def is_peft(self) -> bool:
        """Whether it is an adapter on model.path, as peft writes it."""
        return self.path is not None and is_peft_folder(self.path)

    def lora(self, config: Config) -> Lora | None:
        """The adapters that hold its weights. Raises InputError for a damaged folder of peft."""
        if self.path is None or self.is_hf:
            return None
        return read_lora(self.path) if self.is_peft else config.models["actor"].lora


def is_hf_folder(path: Path) -> bool:
    """Whether transformers would load it as a whole model."""
    return (path / "config.json").is_file() and not is_peft_folder(path)


def path_problems(paths: Sequence[Path], steps: Sequence[int] | str | None) -> list[Problem]:
    """What is wrong with --checkpoint and --steps, as far as names of folders tell."""
    none = (
        "is neither a run, nor a checkpoint, nor a Hugging Face folder",
        "give a folder with checkpoints/, manifest.json, config.json or adapter_config.json",
    )

    def is_folder(path: Path) -> bool:
        return is_hf_folder(path) or is_peft_folder(path)

    found = [
        Problem("--checkpoint", str(path), *none)
        for path in paths
        if not is_folder(path) and not _checkpoints(path)
    ]
    if steps is not None and (len(paths) != 1 or is_folder(paths[0])):
        rule = "are steps of one run: name its folder in --checkpoint, once"
        found.append(Problem("--steps", steps, rule))
    return found


def find_targets(
    paths: Sequence[Path], steps: Sequence[int] | str | None, mesh: Mesh
) -> list[Target]:
    """In the order given, steps ascending; the same on every rank. Collective.

    Raises InputError for a step that has no checkpoint.
    """

    def find() -> list[Target]:
        if mesh.rank != 0:
            return []
        return _steps(paths[0], steps) if steps is not None else _labelled(paths)

    return _agreed(find, mesh)[0]


def _steps(path: Path, steps: Sequence[int] | str) -> list[Target]:
    there = {step: found for found in _checkpoints(path) if (step := step_of(found)) is not None}
    wanted = sorted(there) if isinstance(steps, str) else sorted(set(steps))
    missing = [step for step in wanted if step not in there]
    if missing:
        has = ", ".join(map(str, sorted(there)))
        raise InputError(f"--steps = {missing}: {path} has no such checkpoint; it has {has}")
    return [Target(f"step_{step:08d}", step, there[step]) for step in wanted]


def _labelled(paths: Sequence[Path]) -> list[Target]:
    targets: list[Target] = []
    for path in paths:
        name = label = path.resolve().name
        while label in [target.label for target in targets]:
            label = f"{name}_{sum(t.label.startswith(name) for t in targets) + 1}"
        targets.append(Target(label, step_of(path), path))
    return targets or [Target("model", 0, None)]


def _checkpoints(path: Path) -> list[Path]:
    """Those of a run or a folder; a checkpoint itself; nothing for a path that is none."""
    try:
        return candidates(path)
    except CheckpointError:
        return []


def lora_of(targets: Sequence[Target], config: Config, mesh: Mesh) -> Lora | None:
    """The adapters of the model that all targets come into. Collective.

    Raises InputError on all ranks where they need different ones.
    """

    def find() -> Lora | None:
        first, *others = (target.lora(config) for target in targets)
        for target, lora in zip(targets[1:], others, strict=True):
            if _shape(lora) != _shape(first):
                raise InputError(
                    f"--checkpoint = {target.path}: {_described(lora)}, and {targets[0].path} "
                    f"{_described(first)}: evaluate them one by one"
                )
        return first

    return _agreed(find, mesh)[0]


def _shape(lora: Lora | None) -> Lora | None:
    """All of it but where it comes from."""
    return lora and lora._replace(section="")


def _described(lora: Lora | None) -> str:
    if lora is None:
        return "is a whole model"
    modules = ", ".join(lora.target_modules[:3])
    return f"has adapters of rank {lora.rank}, alpha {lora.alpha:g} on {modules}, ..."


def _agreed(step: Callable[[], Result], mesh: Mesh) -> list[Result]:
    """What `step` returns on every rank; an InputError of one is raised on all."""
    return together(step, mesh.host_group, InputError, expected=InputError, name_ranks=False)


def load_target(
    module: nn.Module,
    target: Target,
    config: Config,
    mesh: Mesh,
    *,
    base: Path,
    holds: Path | None,
) -> Target:
    """The weights into a module of `build_causal_lm`; the target as it was found. Collective.

    The module may rest on the host. `base`: folder of model.path; `holds`: whose weights the module
    has, which are not read again.
    Raises InputError on all ranks for weights that are damaged, gone, or of another model.
    """
    path = target.path
    if path is None or path == holds:
        return target
    if target.is_peft:
        _agreed(lambda: load_adapter(module, path), mesh)
        return target
    if target.is_hf:
        _check_same_model(path, base, config)
        dtype = getattr(torch, config.model.dtype)
        reload_weights(module, path, mesh, model_config=config.model, dtype=dtype)
        return target
    try:
        with Checkpointer(path, mesh) as checkpoints:
            found = checkpoints.load_newest(path, {"actor": module})
    except CheckpointError as error:
        raise InputError(f"--checkpoint = {path}: {error}") from error
    return target._replace(step=step_of(found))


def _check_same_model(path: Path, base: Path, config: Config) -> None:
    """Raise InputError unless all that weights do not say is the same as of the base."""
    mine, first = (
        load_hf_config(folder, config.model).to_dict()
        | {"generation: eos_token_id": read_generation_config(folder).get("eos_token_id")}
        for folder in (path, base)
    )
    ignored = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
    differs = [
        name
        for name in sorted(mine.keys() | first.keys())
        if name not in ignored and mine.get(name) != first.get(name)
    ]
    if differs:
        raise InputError(
            f"--checkpoint = {path}: is not the model of {config.model.path}, into which its "
            f"weights would go: {', '.join(differs)} differ; evaluate it alone"
        )
