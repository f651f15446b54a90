"""Files of one checkpoint: durability, the manifest, JSON that is not trusted.

Owns how a file gets onto the disk whole, and what the manifest says. Must not know what the other
files hold, which checkpoints there are, nor which ranks exist.

    step_00000012/          written as step_00000012.tmp and renamed when everything is durable
        manifest.json       bytes and CRC-32 of every other file; step, place in the order, metric
        train_state.json    what is not a tensor
        checksums.json      CRC-32 of every MiB of the files of tensors
        tensors/            torch distributed checkpoint
        models/NAME/        config.json of each model
        assets/             tokenizer and generation config
        hf_NAME/            optional: the model in Hugging Face format
    latest                  name of the newest, for people and scripts
"""

import json
import math
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from sharding.progress import PROGRESS

MANIFEST = "manifest.json"
TRAIN_STATE = "train_state.json"
CHECKSUMS = "checksums.json"
TENSORS = "tensors"
LATEST = "latest"
REPLACED = ".replaced"
"""suffix of the older checkpoint of a step while a newer one takes its name"""
_NAME = re.compile(r"step_(\d{8,})")
_CHUNK = 1 << 22
_LARGEST = 2**53
"""of whole numbers in a manifest: every JSON reader knows them exactly"""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message names folder and cause."""


class DamagedCheckpoint(CheckpointError):
    """One whose tensors are not as they were written, as reading them has shown."""


class FileRecord(NamedTuple):
    """What the manifest says about one file."""

    num_bytes: int
    crc32: int


def step_of(path: Path) -> int | None:
    """The step that the name of a checkpoint says; None for a name that a save does not give."""
    match = _NAME.fullmatch(path.name.removesuffix(REPLACED))
    return int(match[1]) if match else None


def write_durably(path: Path, data: bytes) -> FileRecord:
    """Write beside, sync, rename: the file is there whole, or not at all."""
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    put_in_place(beside, path)
    return FileRecord(len(data), zlib.crc32(data))


def put_in_place(beside: Path, path: Path) -> None:
    """Give a file or folder whose content is durable its name, durably."""
    beside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names inside the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def record_files(folder: Path, root: Path) -> dict[str, FileRecord]:
    """Sync every file below `folder`, and return its record by path relative to `root`."""
    sync_tree(folder)
    files = (path for path in sorted(folder.rglob("*")) if not path.is_dir())
    return {str(path.relative_to(root)): record_file(path) for path in files}


def sync_tree(folder: Path) -> None:
    """Make all files below the folder durable, and their names."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            PROGRESS.tick()
    sync_folder(folder)


def record_file(path: Path) -> FileRecord:
    """Size and checksum of a file as it is."""
    num_bytes = crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            num_bytes += len(chunk)
            crc32 = zlib.crc32(chunk, crc32)
            PROGRESS.tick()
    return FileRecord(num_bytes, crc32)


def write_manifest(
    folder: Path, files: Mapping[str, FileRecord], properties: Mapping[str, Any]
) -> None:
    """The last file of a checkpoint: what it consists of, and `properties`."""
    content = {**properties, "files": {name: list(files[name]) for name in sorted(files)}}
    write_durably(folder / MANIFEST, json.dumps(content, indent=1).encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Properties and files of a checkpoint, each of the type that it must have.

    step: whole number. sequence: place in the order of writing, from 1; 0 = written by a version
    that did not know it, ordered by `saved_at` (seconds). metric: number or None, with its
    metric_name. files: FileRecord by path.

    Raises:
        CheckpointError: there is none, or it is not what a save writes.
    """
    manifest = read_json(folder / MANIFEST)
    try:
        manifest = {"sequence": 0, "metric": None, "metric_name": None, **manifest}
        manifest["files"] = {name: FileRecord(*r) for name, r in manifest["files"].items()}
        wrong = _first_wrong(manifest)
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{folder}: not a complete checkpoint: {error!r}") from error
    if wrong is not None:
        raise CheckpointError(f"{folder}: {MANIFEST} is not as it was written: {wrong}")
    return manifest


def read_json(path: Path) -> Any:
    """What a JSON file holds; files of other hands may hold anything.

    Raises:
        CheckpointError: it cannot be read or is no JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        why = f"{path.name}: {error.strerror if isinstance(error, OSError) else repr(error)}"
        raise CheckpointError(f"{path.parent}: not a complete checkpoint: {why}") from error


def is_whole_number(value: Any) -> bool:
    """A number from 0 on that JSON keeps exactly; true and 1.0 are none."""
    return type(value) is int and 0 <= value <= _LARGEST


def _first_wrong(manifest: Mapping[str, Any]) -> str | None:
    """The first entry of a manifest that no save would have written."""
    for key in ("step", "sequence"):
        if not is_whole_number(manifest[key]):
            return f"{key} = {manifest[key]!r}"
    if manifest["metric"] is not None and not _is_number(manifest["metric"]):
        return f"metric = {manifest['metric']!r}"
    if not isinstance(manifest["metric_name"], str | None):
        return f"metric_name = {manifest['metric_name']!r}"
    if manifest["sequence"] == 0 and not math.isfinite(manifest["saved_at"]):
        return f"saved_at = {manifest['saved_at']!r}"
    for name, record in manifest["files"].items():
        path = PurePosixPath(name)
        if "\0" in name or path.is_absolute() or ".." in path.parts:
            return f"file name {name!r}"
        if not all(map(is_whole_number, record)):
            return f"record of {name}: {list(record)!r}"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
