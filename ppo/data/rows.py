"""Rows of parquet and JSONL files, as they stand there.

Owns finding and reading files, and errors that say where. Must not know what the columns mean.
Rows are counted from 0, lines of a JSONL file from 1.
"""

import glob
import itertools
import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ppo.errors import InputError

if TYPE_CHECKING:
    import pyarrow

PARQUET = {".parquet"}
JSON_LINES = {".jsonl", ".json", ".ndjson"}
CONVERTED = {
    **dict.fromkeys((".csv", ".tsv"), "python -m ppo.data.prepare csv makes parquet of it"),
    **dict.fromkeys((".gz", ".zst", ".xz", ".bz2", ".zip"), "unpack it first"),
}
"""what makes a file that is read of one that is not, by its suffix"""
LFS_HEAD = b"version https://git-lfs.github.com/"
MAX_DEPTH = 100
"""of what a row holds: pickling it, on its way to the rewards, takes stack for each level"""
ARRAY = "a JSON array (jq -c '.[]' FILE > FILE.jsonl writes one object per line)"


class DataError(InputError):
    """Something is wrong with a data file; the message names file, row and column."""

    def __init__(
        self,
        file: str | Path,
        problem: str,
        *,
        row: int | None = None,
        line: int | None = None,
        column: str | None = None,
    ) -> None:
        self.file, self.row, self.column, self.problem = str(file), row, column, problem
        where = [_place(file, row, line)]
        if column is not None:
            where.append(f"column '{column}'")
        super().__init__(f"{', '.join(where)}: {problem}")


class Row(NamedTuple):
    """One row as it stands in its file."""

    file: Path
    index: int  # of the row in the file, from 0
    line: int | None  # of a JSONL file, from 1
    values: dict[str, Any]

    @property
    def where(self) -> str:
        """File and row, as messages name them."""
        return _place(self.file, self.index, self.line)

    def error(self, problem: str, column: str | None = None) -> DataError:
        """The problem with this row, as an error that says where it is."""
        return DataError(self.file, problem, row=self.index, line=self.line, column=column)


def find_files(files: str | Sequence[str]) -> list[Path]:
    """Paths of the files and globs, in the order given, a glob's sorted. Raises DataError."""
    found: list[Path] = []
    for pattern in [files] if isinstance(files, str) else files:
        expanded = os.path.expanduser(pattern)
        is_name = os.path.lexists(expanded)  # data[1].jsonl may be a name, and a glob
        paths = [expanded] if is_name else sorted(glob.glob(expanded, recursive=True))
        problem = None if paths else "no such file"
        if not paths and glob.has_magic(expanded):
            problem = "no file matches"
        problem = problem or next(filter(None, map(_unreadable, paths)), None)
        if problem is not None:
            raise DataError(pattern, problem)
        found.extend(map(Path, paths))
    if not found:
        raise DataError("data files", "none given")
    return found


def _unreadable(path: str) -> str | None:
    """Why what has this name is no file to read: a device could be read for ever."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:  # a link to nothing, or to itself
        return f"{path} cannot be read: {error.strerror}"
    if stat.S_ISDIR(mode):
        return "is a folder: name its files, or a glob"
    return None if stat.S_ISREG(mode) else f"{path} is no regular file"


def read_rows(path: Path, *, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Rows of one file in order. Raises DataError when it is not readable, or holds no row.

    columns: all that is read of a parquet file, as far as they are there.
    """
    suffix = path.suffix.lower()
    if suffix not in PARQUET | JSON_LINES:
        known = " ".join(sorted(PARQUET | JSON_LINES))
        hint = f" ({CONVERTED[suffix]})" if suffix in CONVERTED else ""
        raise DataError(path, f"unknown kind of file '{suffix}'; known: {known}{hint}")
    count = 0
    rows = _read_parquet(path, columns) if suffix in PARQUET else _read_json_lines(path)
    for row in rows:
        count += 1
        yield row
    if count == 0:
        raise DataError(path, "is empty: it holds no row")


def _read_parquet(path: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    index = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if columns is not None:  # of none at all there would be no rows
                names = file.schema_arrow.names
                columns = [name for name in names if name in columns] or names[:1]
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for values in _values(batch, path, index):
                    yield Row(path, index, None, values)
                    index += 1
    except (pyarrow.ArrowException, OSError) as error:
        reason = lfs_pointer(path) or " ".join(str(error).split())  # Arrow's has lines
        raise DataError(path, f"cannot be read as parquet: {reason}") from error


def _values(batch: "pyarrow.RecordBatch", path: Path, index: int) -> list[dict[str, Any]]:
    """The rows of a batch, whose first has this index in the file."""
    try:
        return batch.to_pylist()
    except ValueError:  # text that is not UTF-8: in which row and column?
        for row in range(len(batch)):
            for name in batch.schema.names:
                try:
                    batch.column(name)[row].as_py()
                except ValueError as error:
                    problem = f"is not readable: {error}"
                    raise DataError(path, problem, row=index + row, column=name) from error
        raise


def _read_json_lines(path: Path) -> Iterator[Row]:
    index = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield Row(path, index, number, _parse_line(line, path, index, number))
                    index += 1
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}") from error


def _parse_line(line: bytes, path: Path, index: int, number: int) -> dict[str, Any]:
    """One line of JSON as a mapping of columns; text in it is valid Unicode."""

    def error(problem: str, column: str | None = None) -> DataError:
        return DataError(path, problem, row=index, line=number, column=column)

    try:
        values = json.loads(line)
    except RecursionError:
        raise error("is nested too deeply") from None
    except ValueError as problem:  # bad JSON, or not UTF-8
        where = str(problem)
        if isinstance(problem, json.JSONDecodeError):  # its own line number is not the file's
            where = f"{problem.msg} at character {problem.pos + 1} of the line"
        if index == 0 and line.lstrip()[:1] == b"[":
            raise error(f"must be a JSON object, one per line, not {ARRAY}") from None
        pointer = lfs_pointer(path) if index == 0 else None
        raise error(f"is not JSON: {pointer or where}") from problem
    if not isinstance(values, dict):
        kind = ARRAY if isinstance(values, list) else kind_of(values)
        raise error(f"must be a JSON object, one per line, not {kind}")
    for column, value in values.items():
        problem = _bad_text(column) or _bad_value(value)
        if problem is not None:
            raise error(problem, column.encode("utf-8", "backslashreplace").decode())
    return values


def _bad_value(value: Any, depth: int = 1) -> str | None:
    """Why a value of JSON could not be passed on: to files, to the processes of the rewards."""
    if isinstance(value, str):
        return _bad_text(value)
    if not isinstance(value, (dict, list)):
        return None
    if depth == MAX_DEPTH:
        return f"is nested more than {MAX_DEPTH} deep"
    inner = value
    if isinstance(value, dict):
        inner = itertools.chain(value, value.values())
    return next(filter(None, (_bad_value(each, depth + 1) for each in inner)), None)


def _bad_text(text: str) -> str | None:
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return (
            f"has half a surrogate pair (\\u{ord(text[error.start]):04x}) at character "
            f"{error.start}: no valid Unicode"
        )
    return None


def lfs_pointer(path: Path) -> str | None:
    """What to do about a file of which git has fetched the name alone; None for any other.

    A pointer of Git LFS is a short text in the place of the file's content.
    """
    with path.open("rb") as file:
        is_pointer = file.read(len(LFS_HEAD)) == LFS_HEAD
    return "it is a pointer of Git LFS: `git lfs pull` fetches the file" if is_pointer else None


def kind_of(value: Any) -> str:
    """What a value is, for messages."""
    return "null" if value is None else type(value).__name__


def _place(file: str | Path, row: int | None, line: int | None) -> str:
    """File and row; a name that is not UTF-8 is escaped, messages are written to files."""
    name = str(file).encode("utf-8", "backslashreplace").decode()
    if row is None:
        return name
    return f"{name}, row {row}" + (f" (line {line})" if line is not None else "")
