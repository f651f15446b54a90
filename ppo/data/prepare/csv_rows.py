"""Records of CSV and TSV files, for the commands that prepare data: a run reads parquet and JSONL.

Every value is text; the first line names the columns.
"""

import csv
from collections.abc import Iterator
from pathlib import Path

from ppo.data.rows import DataError, Row

SEPARATORS = {".csv": ",", ".tsv": "\t"}
LARGEST_FIELD = 1 << 27


def read_csv(path: Path) -> Iterator[Row]:
    """Rows of one file in order; an empty field is null. Raises DataError."""
    csv.field_size_limit(LARGEST_FIELD)
    index = -1
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            separator = _separator(path, file.readline())
            file.seek(0)
            reader = csv.DictReader(file, delimiter=separator, strict=True)
            _check_names(path, reader.fieldnames)
            for index, values in enumerate(reader):
                if None in values or any(value is None for value in values.values()):
                    problem = f"has more or fewer fields than the {len(reader.fieldnames or ())} "
                    raise DataError(path, problem + "columns", row=index, line=reader.line_num)
                known = {name: value or None for name, value in values.items()}
                yield Row(path, index, reader.line_num, known)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(path, f"cannot be read: {error}", row=index + 1) from error
    if index < 0:
        raise DataError(path, "is empty: it holds no row")


def _separator(path: Path, first: str) -> str:
    """By the suffix; a spreadsheet whose decimals have commas writes semicolons."""
    usual = SEPARATORS[path.suffix.lower()]
    return ";" if usual == "," and "," not in first and ";" in first else usual


def _check_names(path: Path, names: object) -> None:
    if not isinstance(names, list) or not names:
        raise DataError(path, "is empty: its first line must name the columns")
    twice = sorted({name for name in names if names.count(name) > 1 or not name.strip()})
    if twice:
        raise DataError(path, f"its first line names a column twice, or not at all: {twice}")
