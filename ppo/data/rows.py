"""Rows of prompt files: parquet and JSONL, in verl's row format or simpler ones.

Owns finding, reading and checking rows, without tokenizer and without transformers, so that bad
data is found before any model is loaded. Rows are counted from 0, lines of a JSONL file from 1.
"""

import glob
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ppo.config import DataConfig
from ppo.errors import InputError

PARQUET = {".parquet"}
JSON_LINES = {".jsonl", ".json", ".ndjson"}
NO_SOURCE = "unknown"
"""data_source of rows without one, as verl calls it"""
QUICK_ROWS = 64
"""rows of each file that `check_data_files` reads"""


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
        self.file, self.row, self.column = str(file), row, column
        where = [str(file)]
        if row is not None:
            where.append(f"row {row}" + (f" (line {line})" if line is not None else ""))
        if column is not None:
            where.append(f"column '{column}'")
        super().__init__(f"{', '.join(where)}: {problem}")


class Row(NamedTuple):
    """One row as it stands in its file."""

    file: Path
    index: int  # of the row in the file, from 0
    line: int | None  # of a JSONL file, from 1
    values: dict[str, Any]

    def error(self, problem: str, column: str | None = None) -> DataError:
        """The problem with this row, as an error that says where it is."""
        return DataError(self.file, problem, row=self.index, line=self.line, column=column)


class Sample(NamedTuple):
    """What a row says, checked."""

    messages: list[dict[str, str]] | str  # as written: a conversation, or plain text
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


def find_files(files: str | Sequence[str]) -> list[Path]:
    """Paths of the files and globs, in the order given, a glob's sorted. Raises DataError."""
    found: list[Path] = []
    for pattern in [files] if isinstance(files, str) else files:
        expanded = str(Path(pattern).expanduser())
        if Path(expanded).is_file():
            found.append(Path(expanded))
            continue
        matches = [Path(match) for match in sorted(glob.glob(expanded, recursive=True))]
        if not matches or any(match.is_dir() for match in matches):
            kind = "is a folder: name its files, or a glob" if matches else "no such file"
            raise DataError(pattern, f"{kind} (from {Path.cwd()})")
        found.extend(matches)
    if not found:
        raise DataError("data files", "none given")
    return found


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of one file in order. Raises DataError when it is not readable, or holds no row."""
    suffix = path.suffix.lower()
    if suffix not in PARQUET | JSON_LINES:
        known = " ".join(sorted(PARQUET | JSON_LINES))
        raise DataError(path, f"unknown kind of file '{suffix}'; known: {known}")
    count = 0
    for row in _read_parquet(path) if suffix in PARQUET else _read_json_lines(path):
        count += 1
        yield row
    if count == 0:
        raise DataError(path, "is empty: it holds no row")


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    index = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    yield Row(path, index, None, values)
                    index += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(path, f"cannot be read as parquet: {error}") from error


def _read_json_lines(path: Path) -> Iterator[Row]:
    index = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except ValueError as error:  # bad JSON, or not UTF-8
                problem = f"is not JSON: {error}"
                raise DataError(path, problem, row=index, line=number) from error
            if not isinstance(values, dict):
                problem = f"must be a JSON object, one per line, not {_kind(values)}"
                raise DataError(path, problem, row=index, line=number)
            yield Row(path, index, number, values)
            index += 1


def parse_row(row: Row, data: DataConfig, *, need_data_source: bool = True) -> Sample:
    """Check one row and take it apart.

    Required: the prompt column (text, or a list of {role, content}) and, unless a scorer of the
    user does without (`need_data_source` false), the column that picks the scorer. Optional:
    `reward_model` {ground_truth, ...}, or a column `ground_truth`; `extra_info`; every other
    column is added to extra_info. Raises DataError.
    """
    values = dict(row.values)
    messages = _parse_prompt(row, values.pop(data.prompt_key, None), data.prompt_key)
    source = values.pop(data.reward_fn_key, None)
    if source is None and need_data_source:
        problem = (
            "is missing: it picks the built-in scorer (data.reward_fn_key); reward.function.path "
            "or a reward model does without"
        )
        raise row.error(f"{problem}; found {_columns(row)}", data.reward_fn_key)
    if source is not None and not isinstance(source, str):
        raise row.error(f"must be text, not {_kind(source)}", data.reward_fn_key)
    reward_model = _optional_dict(row, values.pop("reward_model", None), "reward_model")
    extra = _optional_dict(row, values.pop("extra_info", None), "extra_info")
    fallback = values.pop("ground_truth", None)
    truth = reward_model.get("ground_truth", fallback)
    return Sample(messages, source or NO_SOURCE, truth, values | extra)


def _parse_prompt(row: Row, prompt: Any, key: str) -> list[dict[str, str]] | str:
    if prompt is None:
        problem = "is null" if key in row.values else "is missing (data.prompt_key)"
        raise row.error(f"{problem}; found {_columns(row)}", key)
    if isinstance(prompt, str):
        if not prompt:
            raise row.error("is an empty text", key)
        return prompt
    if not isinstance(prompt, list):
        raise row.error(f"must be text or a list of {{role, content}}, not {_kind(prompt)}", key)
    if not prompt:
        raise row.error("is an empty list of messages", key)
    return [_parse_message(row, message, key, i) for i, message in enumerate(prompt)]


def _parse_message(row: Row, message: Any, key: str, index: int) -> dict[str, str]:
    if not isinstance(message, dict):
        raise row.error(f"message {index} must be {{role, content}}, not {_kind(message)}", key)
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            kind = _kind(message.get(name))
            raise row.error(f"message {index} needs a text '{name}', not {kind}", key)
    # a parquet struct has all keys in all rows: those that are null were not written
    return {name: value for name, value in message.items() if value is not None}


def _optional_dict(row: Row, value: Any, column: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise row.error(f"must be a mapping, not {_kind(value)}", column)
    return value


def _columns(row: Row) -> str:
    return "columns " + ", ".join(row.values) if row.values else "no columns"


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def check_data_files(
    files: str | Sequence[str], data: DataConfig, *, need_data_source: bool = True
) -> None:
    """Raise DataError for a missing or empty file, a missing column or a bad type, in no time.

    Looks at the first rows of each file; loading the dataset checks the rest. `tiny` is no file.
    """
    if is_tiny(files):
        return
    for path in find_files(files):
        for row in islice(read_rows(path), QUICK_ROWS):
            parse_row(row, data, need_data_source=need_data_source)


def is_tiny(files: str | Sequence[str]) -> bool:
    """Whether this is the built-in copy task instead of files."""
    return files == "tiny" or list(files) == ["tiny"]
