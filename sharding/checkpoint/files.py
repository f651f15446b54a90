"""Files of a checkpoint: durability, the manifest, and which folders are complete.

Owns what makes a folder a complete checkpoint. Must not know what the files hold, nor which ranks
exist.

    step_00000012/          written as step_00000012.tmp and renamed when everything is durable
        manifest.json       bytes and CRC-32 of every other file, step, metric, time of writing
        train_state.json    what is not a tensor
        tensors/            torch distributed checkpoint
        models/NAME/        config.json of each model
        assets/             tokenizer and generation config
        hf_NAME/            optional: the model in Hugging Face format
    latest                  name of the newest, for people and scripts
"""

import json
import logging
import math
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
TRAIN_STATE = "train_state.json"
TENSORS = "tensors"
LATEST = "latest"
_CHUNK = 1 << 22


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message names folder and cause."""


class FileRecord(NamedTuple):
    """What the manifest says about one file."""

    num_bytes: int
    crc32: int


def write_durably(path: Path, data: bytes) -> FileRecord:
    """Write beside, sync, rename: the file is there whole, or not at all."""
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_folder(path.parent)
    return FileRecord(len(data), zlib.crc32(data))


def sync_folder(folder: Path) -> None:
    """Make the names inside the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def record_files(folder: Path, root: Path) -> dict[str, FileRecord]:
    """Sync every file below `folder`, and return its record by path relative to `root`."""
    records = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            sync_folder(path)
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())
        records[str(path.relative_to(root))] = _record(path)
    sync_folder(folder)
    return records


def _record(path: Path) -> FileRecord:
    num_bytes = crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            num_bytes += len(chunk)
            crc32 = zlib.crc32(chunk, crc32)
    return FileRecord(num_bytes, crc32)


def write_manifest(
    folder: Path, files: Mapping[str, FileRecord], properties: Mapping[str, Any]
) -> None:
    """The last file of a checkpoint: what it consists of, and `properties`."""
    content = {**properties, "files": {name: list(files[name]) for name in sorted(files)}}
    write_durably(folder / MANIFEST, json.dumps(content, indent=1).encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Properties and files of a checkpoint.

    Raises:
        CheckpointError: there is none or it cannot be read.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        manifest["files"] = {name: FileRecord(*r) for name, r in manifest["files"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: not a complete checkpoint: {error!r}") from error
    return manifest


def find_damage(folder: Path, *, share: int = 0, num_shares: int = 1) -> str | None:
    """What is wrong with the files of a checkpoint, or None.

    Reads every `num_shares`-th file in full, so that ranks can divide the work.
    """
    try:
        files = read_manifest(folder)["files"]
    except CheckpointError as error:
        return str(error)
    for name, record in sorted(files.items())[share::num_shares]:
        try:
            found = _record(folder / name)
        except OSError as error:
            return f"{folder / name}: {error.strerror}"
        if found.num_bytes != record.num_bytes:
            return f"{folder / name}: {found.num_bytes} bytes instead of {record.num_bytes}"
        if found != record:
            return f"{folder / name}: wrong checksum"
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints below `folder`, the newest written first; before them those without a manifest.

    Not by step: a run that went back to an old checkpoint goes on from there.
    """

    def age(path: Path) -> tuple[float, str]:
        try:
            return read_manifest(path)["saved_at"], path.name
        except (CheckpointError, KeyError):
            return math.inf, path.name

    found = [path for path in folder.glob("step_*") if path.is_dir() and not path.suffix]
    return sorted(found, key=age, reverse=True)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint meant by a path: itself, or the newest undamaged one of a run's folder.

    Raises:
        CheckpointError: there is none.
    """
    if (path / MANIFEST).exists():
        return path
    for folder in (path, path / "checkpoints"):
        for candidate in list_checkpoints(folder):
            damage = find_damage(candidate)
            if damage is None:
                return candidate
            logger.warning("skipped: %s", damage)
    raise CheckpointError(f"{path}: no complete checkpoint here or in checkpoints/")


def remove_leftovers(folder: Path) -> None:
    """Delete what an interrupted save or deletion left behind."""
    for path in (*folder.glob("step_*.tmp"), *folder.glob("step_*.deleting")):
        shutil.rmtree(path)


def set_aside(path: Path) -> None:
    """Mark for `remove_leftovers`, such that half of a checkpoint is never seen."""
    path.rename(path.with_suffix(".deleting"))
