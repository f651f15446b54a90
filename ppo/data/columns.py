"""What a row says: its prompt, who scores it and against what. verl's row format or simpler ones.

Owns the meaning of the columns, without tokenizer and without transformers, so that bad data is
found before any model is loaded.
"""

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from ppo.config import DataConfig
from ppo.data.rows import Row, find_files, kind_of, read_rows

NO_SOURCE = "unknown"
"""data_source of rows without one, as verl calls it"""
QUICK_ROWS = 64
"""rows of each file that `check_data_files` reads"""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""columns, and kinds of the parts of a message, that no language model reads"""
CHARS_PER_TOKEN = 64
"""a text this much longer than data.max_prompt_length is not tokenized whole to learn that it is"""

ONLY_TEXT = (
    "text alone is read, also by the language model of a multimodal one: leave such rows out, or "
    "rename a column that is for the reward"
)


class Sample(NamedTuple):
    """What a row says, checked."""

    messages: list[dict[str, str]] | str  # as written: a conversation, or plain text
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


def parse_row(row: Row, data: DataConfig, *, need_data_source: bool = True) -> Sample:
    """Check one row and take it apart.

    Required: the prompt column (text, or a list of {role, content}) and, unless a scorer of the
    user does without (`need_data_source` false), the column that picks the scorer. Optional:
    `reward_model` {ground_truth, ...}, or a column `ground_truth`; `extra_info`; every other
    column is added to extra_info. Raises DataError.
    """
    values = dict(row.values)
    for column in MEDIA:
        if _holds(values.get(column)):
            raise row.error(f"the prompt comes with {column}, and {ONLY_TEXT}", column)
    messages = _parse_prompt(row, values.pop(data.prompt_key, None), data.prompt_key)
    source = values.pop(data.reward_fn_key, None)
    if source is None and need_data_source:
        problem = (
            "is missing: it picks the built-in scorer (data.reward_fn_key); reward.function.path "
            "or a reward model does without"
        )
        raise row.error(f"{problem}; found {_columns(row)}", data.reward_fn_key)
    if source is not None and not isinstance(source, str):
        raise row.error(f"must be text, not {kind_of(source)}", data.reward_fn_key)
    reward_model = _optional_dict(row, values.pop("reward_model", None), "reward_model")
    extra = _optional_dict(row, values.pop("extra_info", None), "extra_info")
    column, truth = "ground_truth", values.pop("ground_truth", None)
    if reward_model.get("ground_truth") is not None:
        column, truth = "reward_model", reward_model["ground_truth"]
    if isinstance(truth, float) and not math.isfinite(truth):
        raise row.error(f"the ground truth is {truth}", column)
    # by their own names too, for rewards that take columns by name
    named = {data.prompt_key: messages, data.reward_fn_key: source}
    named = {name: value for name, value in named.items() if name not in ("prompt", "data_source")}
    return Sample(messages, source or NO_SOURCE, truth, named | values | extra)


def _parse_prompt(row: Row, prompt: Any, key: str) -> list[dict[str, str]] | str:
    if prompt is None:
        problem = "is null" if key in row.values else "is missing (data.prompt_key)"
        raise row.error(f"{problem}; found {_columns(row)}", key)
    if isinstance(prompt, str):
        if not prompt:
            raise row.error("is an empty text", key)
        return prompt
    if not isinstance(prompt, list):
        raise row.error(f"must be text or a list of {{role, content}}, not {kind_of(prompt)}", key)
    if not prompt:
        raise row.error("is an empty list of messages", key)
    return [_parse_message(row, message, key, i) for i, message in enumerate(prompt)]


def _holds(value: Any) -> bool:
    """Whether a column says something: rows without images have an empty list there."""
    return value is not None and not (isinstance(value, str | list | dict) and not value)


def _parse_message(row: Row, message: Any, key: str, index: int) -> dict[str, str]:
    if not isinstance(message, dict):
        raise row.error(f"message {index} must be {{role, content}}, not {kind_of(message)}", key)
    if isinstance(message.get("content"), list):
        message = message | {"content": _text_of(row, message["content"], key, index)}
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            kind = kind_of(message.get(name))
            raise row.error(f"message {index} needs a text '{name}', not {kind}", key)
    # a parquet struct has all keys in all rows: those that are null were not written
    return {name: value for name, value in message.items() if value is not None}


def _text_of(row: Row, parts: list[Any], key: str, index: int) -> str:
    """The text of a content in parts, as models of text and images take it."""
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else kind_of(part)
        if kind != "text" or not isinstance(part.get("text"), str):
            raise row.error(f"message {index} holds a part of type {kind!r}, and {ONLY_TEXT}", key)
    return "".join(part["text"] for part in parts)


def _optional_dict(row: Row, value: Any, column: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise row.error(f"must be a mapping, not {kind_of(value)}", column)
    return value


def _columns(row: Row) -> str:
    return "columns " + ", ".join(row.values) if row.values else "no columns"


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
