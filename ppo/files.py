"""Files written beside their place and renamed, so that nobody ever reads half of one.

Owns the ways of writing that commands and runs share. Knows no content.
"""

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` to write to; renamed over `path` when the block ends well.

    Several threads, processes and hosts may replace the same file at once: the last one stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # by chance: in containers of several hosts processes have the same number
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a file whole: readers and a crash see the old text or the new one."""
    with new_file(path) as beside:
        beside.write_text(text, encoding="utf-8")


def new_numbered(folder: Path, name: str) -> Path:
    """Make and return folder/NAME1, NAME2, ...: the first that is free."""
    number = 1
    while True:
        try:
            (folder / f"{name}{number}").mkdir(parents=True)
            return folder / f"{name}{number}"
        except FileExistsError:
            number += 1


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path`; renamed to `path` when the block ends well.

    When another process has put a folder there meanwhile, that one stays and this is dropped:
    several processes may make the same folder at once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        yield beside
        beside.chmod(0o755)  # mkdtemp's is private
        try:
            os.rename(beside, path)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
