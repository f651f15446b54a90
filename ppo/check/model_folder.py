"""What is wrong with a model's folder on this machine, from the names and heads of its files.

Owns looking, not loading: a few kilobytes of each file are read. Must not import torch or
transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ppo.data.rows import lfs_pointer
from ppo.model_shapes import UNREADABLE

INDEX = "model.safetensors.index.json"
SHOWN = 3
"""names in a message"""


class FolderProblem(NamedTuple):
    """Why a folder is no model that could be loaded, and what to do."""

    rule: str
    fix: str = ""


def model_problems(path: Path) -> Iterator[FolderProblem]:
    """What is wrong with a folder, or a file, that a configuration names as a model."""
    found = config_problem(path) or weights_problem(path)
    if found is not None:
        yield found


def config_problem(path: Path) -> FolderProblem | None:
    """What stands in the place of a folder with a config.json."""
    if path.is_file():
        return FolderProblem(
            "is a file: a model is a folder with config.json and *.safetensors",
            "a GGUF file is made for inference and cannot be trained" * (path.suffix == ".gguf"),
        )
    if (path / "config.json").is_file():
        return None
    rule = "the folder has no config.json"
    if (path / "adapter_config.json").is_file():
        base = _keys(path / "adapter_config.json").get("base_model_name_or_path")
        fix = f"name the model that they were trained on{f' ({base})' if base else ''}"
        return FolderProblem(f"{rule}: it holds adapters", fix)
    if (path / "checkpoints").is_dir() or (path / "manifest.json").is_file():
        fix = f"python -m sharding.checkpoint export {path} FOLDER makes a model of it"
        return FolderProblem(f"{rule}: it is of a run", fix)
    inner = sorted(file.parent for file in path.glob("*/config.json"))
    return FolderProblem(rule, f"{inner[0]} has one" if inner else "")


def weights_problem(folder: Path) -> FolderProblem | None:
    """Weights that are not there, or not whole. Old files (*.bin) are left to a start."""
    files = sorted(folder.glob("*.safetensors"))
    if not files and next(folder.glob("*.bin"), None) is None:
        return FolderProblem("the folder has no weights (*.safetensors)", "copy all of its files")
    index = _keys(folder / INDEX).get("weight_map")
    if isinstance(index, dict) and not (folder / "model.safetensors").is_file():
        named = sorted({name for name in index.values() if isinstance(name, str)})
        missing = [name for name in named if not (folder / name).is_file()]
        if missing:
            rule = f"{len(missing)} of the {len(named)} files that {INDEX} names are missing"
            return FolderProblem(f"{rule}: {_some(missing)}", "copy or download them")
    damaged = [found for found in map(_damage, files) if found is not None]
    return FolderProblem(_some(damaged), "copy or download it again") if damaged else None


def _damage(file: Path) -> str | None:
    """Why a safetensors file is none, or not all of one: its head says how long it is."""
    try:
        with file.open("rb") as opened:
            size = file.stat().st_size
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= size - 8:
                return f"{file.name}: {lfs_pointer(file) or 'is no safetensors file, or cut'}"
            head = json.loads(opened.read(length))
        ends = (value["data_offsets"][1] for key, value in head.items() if key != "__metadata__")
        whole = 8 + length + max(ends, default=0)
    except OSError as error:
        return f"{file.name}: cannot be read: {error.strerror}"
    except (*UNREADABLE, LookupError):
        return f"{file.name}: is no safetensors file"
    return None if size == whole else f"{file.name}: has {size} bytes, whole it has {whole}"


def _keys(file: Path) -> dict[str, object]:
    """Of a JSON object; empty where there is none, which a start tells."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, *UNREADABLE):
        return {}
    return found if isinstance(found, dict) else {}


def _some(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
