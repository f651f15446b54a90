"""A folder of checkpoints: which are ours, in which order they were written, which are deleted.

Owns the names and the order. The order is a number in each manifest, one more than any other's when
it was written, so that it needs no clock: nodes disagree about the time, and a run that went back
writes lower steps later. Touches nothing under a name that a save does not write, nor a folder that
says it is another step's: such a thing is somebody's copy. Called by one rank; must not know ranks.
"""

import logging
import os
import re
import shutil
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from sharding.checkpoint.damage import find_damage
from sharding.checkpoint.files import (
    LATEST,
    MANIFEST,
    REPLACED,
    CheckpointError,
    FileRecord,
    put_in_place,
    read_manifest,
    step_of,
    write_durably,
    write_manifest,
)

logger = logging.getLogger(__name__)

_LEFTOVER = re.compile(r"step_\d{8,}\.(tmp|deleting)")


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints below `folder`, the newest written first; before them those without a manifest.

    Damaged ones and what only bears such a name are among them: whoever loads one looks first.
    """

    def place(path: Path) -> tuple[int, float, str]:
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            return 1 << 60, 0.0, path.name
        sequence = manifest["sequence"]
        return sequence, 0.0 if sequence else manifest["saved_at"], path.name

    return sorted(_entries(folder), key=place, reverse=True)


def find_checkpoint(path: Path, *, before_load: bool = False, skip: Collection[Path] = ()) -> Path:
    """The checkpoint meant by a path: itself, or the newest undamaged one of a run's folder.

    Args:
        before_load: the content of tensors is checked by whoever loads them.
        skip: checkpoints that are known to be damaged.

    Raises:
        CheckpointError: there is none.
    """
    found = candidates(path)
    if found == [path]:
        return path
    for candidate in (candidate for candidate in found if candidate not in skip):
        damage = find_damage(candidate, before_load=before_load)
        if damage is None:
            return candidate
        logger.warning("skipped: %s", damage)
    raise CheckpointError(f"{path}: no complete checkpoint here or in checkpoints/")


def candidates(path: Path) -> list[Path]:
    """What a path may mean: the checkpoint itself, or those of a folder or run, newest first.

    Raises:
        CheckpointError: no path of a file system.
    """
    try:
        if (path / MANIFEST).exists():
            return [path]
        return list_checkpoints(path) or list_checkpoints(path / "checkpoints")
    except (OSError, ValueError) as error:  # too long, a NUL in it, not permitted
        raise CheckpointError(f"{path}: {error}") from error


def publish(
    beside: Path,
    folder: Path,
    *,
    step: int,
    files: Mapping[str, FileRecord],
    metric: float | None = None,
    metric_name: str | None = None,
) -> Path:
    """Give what is written whole its manifest, its place as the newest and its name.

    The renaming makes it a checkpoint. One of the same step is replaced.
    """
    properties = {
        "step": step,
        "sequence": _next_sequence(folder),
        "metric": metric,
        "metric_name": metric_name,
        "saved_at": time.time(),  # for people
    }
    write_manifest(beside, files, properties)
    final = folder / f"step_{step:08d}"
    if os.path.lexists(final):
        _make_way(final)
    put_in_place(beside, final)
    return final


def make_newest(path: Path) -> None:
    """An older checkpoint becomes the newest: a run goes on from it."""
    manifest = read_manifest(path)
    if list_checkpoints(path.parent)[0] != path:
        properties = {key: value for key, value in manifest.items() if key != "files"}
        properties["sequence"] = _next_sequence(path.parent)
        write_manifest(path, manifest["files"], properties)
    point_latest_to(path)


def point_latest_to(path: Path) -> None:
    """Write `latest`, which nothing here reads: that it cannot be written costs no checkpoint."""
    try:
        write_durably(path.parent / LATEST, f"{path.name}\n".encode())
    except OSError as error:
        logger.warning("%s does not name %s: %s", path.parent / LATEST, path.name, error)


def prune(folder: Path, *, max_to_keep: int | None, best_by: str | None) -> None:
    """Delete all but the newest, and the one with the highest metric of that name."""
    if max_to_keep is None:
        return
    ours = [path for path in list_checkpoints(folder) if _is_ours(path)]
    keep = set(ours[: max(1, max_to_keep)])
    metrics = {path: read_manifest(path) for path in ours}
    scored = [
        path
        for path, manifest in metrics.items()
        if manifest["metric"] is not None
        and manifest["metric"] == manifest["metric"]
        and manifest["metric_name"] in (best_by, None)
    ]
    if best_by is not None and scored:
        keep.add(max(scored, key=lambda path: metrics[path]["metric"]))
    for path in ours:
        if path not in keep:
            path.rename(path.with_suffix(".deleting"))
    remove_leftovers(folder)


def remove_leftovers(folder: Path) -> None:
    """Delete what an interrupted save or deletion left behind, and finish a replacement."""
    for path in sorted(folder.iterdir()):
        try:
            if _LEFTOVER.fullmatch(path.name):
                _delete(path)
            elif path.suffix == REPLACED and step_of(path) is not None:
                final = path.with_suffix("")
                _delete(path) if os.path.lexists(final) else path.rename(final)
        except OSError as error:
            logger.warning("%s could not be deleted: %s", path, error)


def _entries(folder: Path) -> list[Path]:
    """Everything that bears the name of a checkpoint: files and dangling links too."""
    try:
        names = set(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    # one that is being replaced counts as long as its name is free
    replaced = {n for n in names if n.endswith(REPLACED) and n.removesuffix(REPLACED) in names}
    return [folder / name for name in names - replaced if step_of(folder / name) is not None]


def _is_ours(path: Path) -> bool:
    """Whether a save wrote it under this name."""
    try:
        return read_manifest(path)["step"] == step_of(path)
    except CheckpointError:
        return False


def _next_sequence(folder: Path) -> int:
    newest = 0
    for path in _entries(folder):
        try:
            newest = max(newest, read_manifest(path)["sequence"])
        except CheckpointError:
            continue
    return newest + 1


def _make_way(final: Path) -> None:
    """Free the name of a checkpoint, such that at every moment one of that step counts."""
    if _is_ours(final):
        final.rename(final.with_suffix(REPLACED))
        return
    number = 1
    while os.path.lexists(aside := final.with_suffix(f".old{number}")):
        number += 1
    final.rename(aside)
    logger.warning("%s is not the checkpoint that its name says; it is now %s", final, aside.name)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
