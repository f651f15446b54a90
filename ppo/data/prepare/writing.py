"""Prepared rows as train.parquet and test.parquet: both, or neither.

Owns the files of one call. Must not know where rows come from.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ppo.data.prepare.sources import PreparedRow
from ppo.data.rows import Row
from ppo.errors import InputError
from ppo.files import new_file

logger = logging.getLogger(__name__)

UNWRITABLE = (pa.ArrowException, OverflowError, TypeError, ValueError)
"""what pyarrow raises where it does not know how to write a value"""


class Part(NamedTuple):
    """The rows of one file, and the records that they were made from (none: they were made up)."""

    rows: Sequence[PreparedRow]
    records: Sequence[Row] = ()


class WriteError(InputError):
    """Files of an earlier call, a value that parquet cannot hold, a folder to which nothing can be
    written."""


def write_parts(out: Path, parts: dict[str, Part]) -> None:
    """Write NAME.parquet for each part that has rows, beside, and rename when all are written.

    Raises WriteError, with file, row and key; nothing is changed then.
    """
    for name, part in parts.items():
        path = out / f"{name}.parquet"
        if not part.rows and path.exists():
            raise WriteError(
                f"{path} is of an earlier call, and this one makes no {name} rows: its questions "
                "might be among the new ones; move it, or write to another folder"
            )
    try:
        with ExitStack() as written:
            for name, part in parts.items():
                if part.rows:
                    _write(written.enter_context(new_file(out / f"{name}.parquet")), part)
    except OSError as error:
        raise WriteError(f"{out}: cannot be written: {error.strerror}") from error
    for name, part in parts.items():
        if part.rows:
            logger.info("wrote %s: %d rows", out / f"{name}.parquet", len(part.rows))


def _write(path: Path, part: Part) -> None:
    problem = _problem(part.rows, path)
    if problem is None:
        return
    fits, fails = 0, len(part.rows)  # rows from the start that can, and cannot, be written
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if _problem(part.rows[:middle]) is None:
            fits = middle
        else:
            fails = middle
    rows = part.rows[:fails]
    for key, column in _columns(rows):
        problem = _problem([{key: value} for value in column])
        if problem is not None:
            break
    else:
        key = ""
    if part.records:
        raise part.records[fails - 1].error(f"cannot be written as parquet: {problem}", key)
    raise WriteError(f"row {fails - 1}, column '{key}': cannot be written as parquet: {problem}")


def _columns(rows: Sequence[PreparedRow]) -> Iterator[tuple[str, list[Any]]]:
    """Columns by the name that they had in the record, those of extra_info one by one."""
    names = dict.fromkeys(name for row in rows for name in row["extra_info"])
    for name in names:
        yield name, [row["extra_info"].get(name) for row in rows]
    for name in rows[0]:
        yield name, [row[name] for row in rows]


def _problem(rows: Sequence[PreparedRow], path: Path | None = None) -> str | None:
    """Why the rows cannot be written; None when they are (without a path: into memory)."""
    try:
        table = pa.Table.from_pylist(list(rows))
        pq.write_table(table, pa.BufferOutputStream() if path is None else path)
    except UNWRITABLE as error:
        return str(error)
    return None
