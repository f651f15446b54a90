"""Whether the parts of a checkpoint are as they were written, and belong together.

Owns what makes a folder a checkpoint that may be trusted: every file has its size and checksum, the
index of the tensors names listed files only, and the train state is that of these tensors. Must not
know ranks or what a trainer's state means.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sharding.checkpoint.blocks import fits
from sharding.checkpoint.files import (
    CHECKSUMS,
    MANIFEST,
    TENSORS,
    TRAIN_STATE,
    CheckpointError,
    FileRecord,
    is_whole_number,
    read_json,
    read_manifest,
    record_file,
    step_of,
)
from sharding.checkpoint.storage import INDEX, SafeReader


def find_damage(
    folder: Path, *, share: int = 0, num_shares: int = 1, before_load: bool = False
) -> str | None:
    """What is wrong with a checkpoint, or None.

    Reads every `num_shares`-th file in full, so that ranks can divide the work; share 0 compares
    the parts with each other besides.

    before_load: of files with `block_checksums` nothing but the size, since their content is
    checked as it is loaded.
    """
    try:
        manifest = read_manifest(folder)
        files = manifest["files"]
        later = block_checksums(folder) if before_load else {}
        if step_of(folder) not in (None, manifest["step"]):
            return f"{folder}: holds step {manifest['step']}, a copy under another step's name"
        for name, record in sorted(files.items())[share::num_shares]:
            if name.removeprefix(f"{TENSORS}/") in later:
                _compare_size(folder / name, record.num_bytes)
            else:
                _compare(folder / name, record)
        if share == 0:
            _check_index(folder, files)
            read_train_state(folder)
    except CheckpointError as error:
        return str(error)
    return None


def block_checksums(folder: Path) -> dict[str, str]:
    """Checksums of blocks (blocks.py) by the name of a file of tensors; {} in older checkpoints.

    Raises:
        CheckpointError: they are not what a save wrote.
    """
    files = read_manifest(folder)["files"]
    if CHECKSUMS not in files:
        return {}
    found = read_json(folder / CHECKSUMS)
    for name, checksums in found.items() if isinstance(found, dict) else [("", None)]:
        record = files.get(f"{TENSORS}/{name}")
        if (
            record is None
            or not isinstance(checksums, str)
            or not fits(checksums, record.num_bytes)
        ):
            raise CheckpointError(f"{folder / CHECKSUMS}: not as it was written")
    return found


def read_train_state(folder: Path) -> dict[str, Any]:
    """step, world_size, optimizers (parameter groups by name) and state, checked.

    Raises:
        CheckpointError: it is not what a save wrote, or was saved with other tensors.
    """
    manifest, train_state = read_manifest(folder), read_json(folder / TRAIN_STATE)
    wrong = _wrong_types(train_state)
    if wrong is None and train_state["step"] != manifest["step"]:
        wrong = f"is of step {train_state['step']}, {MANIFEST} of step {manifest['step']}"
    checksum = train_state.pop("checksum", None) if wrong is None else None
    if checksum is not None and checksum != binding(train_state, manifest["files"]):
        wrong = "was saved with other tensors, or changed since"
    if wrong is not None:
        raise CheckpointError(f"{folder / TRAIN_STATE}: {wrong}")
    return train_state


def bound_train_state(train_state: Mapping[str, Any], files: Mapping[str, FileRecord]) -> bytes:
    """The content of train_state.json: the state, and what binds it to the tensors."""
    checksum = binding(train_state, files)
    return json.dumps({**train_state, "checksum": checksum}, indent=1).encode()


def binding(train_state: Mapping[str, Any], files: Mapping[str, FileRecord]) -> str:
    """A checksum (SHA-256) of the train state together with the records of the tensors' files."""
    tensors = {name: [*record] for name, record in files.items() if name.startswith(f"{TENSORS}/")}
    content = json.dumps([train_state, tensors], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _compare(path: Path, record: FileRecord) -> None:
    """Raise CheckpointError where a file is not as recorded."""
    _compare_size(path, record.num_bytes)
    try:
        found = record_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if found != record:
        raise CheckpointError(f"{path}: wrong checksum")


def _compare_size(path: Path, num_bytes: int) -> None:
    """Raise CheckpointError where there is no file of that size."""
    try:
        found = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if found != num_bytes:
        raise CheckpointError(f"{path}: {found} bytes instead of {num_bytes}")


def _check_index(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Raise CheckpointError where tensors lie in files that nobody has checked."""
    used = {INDEX, *SafeReader(folder / TENSORS).files_of_tensors()}
    needed = {TRAIN_STATE, *(f"{TENSORS}/{name}" for name in used)}
    if unlisted := sorted(needed - files.keys()):
        raise CheckpointError(f"{folder / MANIFEST}: does not list {unlisted[0]}")


def _wrong_types(train_state: Any) -> str | None:
    """What makes this something else than a train state."""
    if not isinstance(train_state, dict):
        return f"holds a {type(train_state).__name__}"
    for key in ("step", "world_size"):
        if not is_whole_number(train_state.get(key)):
            return f"{key} = {train_state.get(key)!r}"
    if not isinstance(train_state.get("state"), dict):
        return f"state is a {type(train_state.get('state')).__name__}"
    optimizers = train_state.get("optimizers")
    if not isinstance(optimizers, dict) or not all(map(_are_groups, optimizers.values())):
        return "optimizers are not lists of parameter groups"
    return None


def _are_groups(groups: Any) -> bool:
    return isinstance(groups, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    )
