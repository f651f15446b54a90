"""Rows of data files to token ids: read, taken apart, put through the chat template, fitted.

Owns which rows become prompts, and what is refused. Must not know who uses the prompts, nor ranks.
"""

import logging
from collections.abc import Generator, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ppo.config import DataConfig
from ppo.data.columns import CHARS_PER_TOKEN, Sample, is_tiny, parse_row
from ppo.data.rows import DataError, Row, find_files, read_rows
from ppo.data.table import Table, TableWriter
from ppo.data.tiny import tiny_rows
from ppo.data.tokenizer import render_chat, token_ids
from ppo.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Split = Literal["train", "val"]
TOKENIZE_ROWS = 1000
"""rows tokenized in one call"""


def read_prompts(
    files: str | Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    data: DataConfig,
    *,
    split: Split = "train",
    need_data_source: bool = True,
    vocabulary: int | None = None,
) -> Generator[float, None, Table]:
    """The prompts of a split, step by step; see `PromptDataset` for the arguments and errors.

    All rows are read before one is tokenized, which takes longer: what is wrong with a row is said
    early. Memory holds a chunk of them only. Yields the number of rows that are read, and then the
    share of them that is tokenized, as a float.
    """
    writer = TableWriter()
    yield from _read(writer, rows_of(files, data, split), data, need_data_source)
    rows = map(unpacked, writer.rows())
    first, start = None, 0
    while chunk := list(islice(rows, TOKENIZE_ROWS)):
        first = first or chunk[0][0]
        all_ids = tokenized(chunk, tokenizer, data)
        for number, (row, sample), ids in zip(count(start), chunk, all_ids, strict=False):
            check_ids(ids, row, tokenizer, data, vocabulary)
            kept = fitted(ids, row, data)
            if kept is not None:
                writer.add_prompt(number, sample, kept, str(row.file))
        start += len(chunk)
        yield start / writer.num_rows
    num_filtered = writer.num_rows - writer.num_prompts
    if num_filtered:
        logger.info(
            "%s data: %d of %d prompts are longer than data.max_prompt_length = %d tokens and "
            "left out",
            *(split, num_filtered, writer.num_rows, data.max_prompt_length),
        )
    if first is not None and writer.num_prompts == 0:
        raise DataError(
            first.file,
            f"every prompt is longer than data.max_prompt_length = {data.max_prompt_length}",
        )
    return writer.finish()


def unpacked(record: Sequence[Any]) -> tuple[Row, Sample]:
    """What `read_prompts` keeps of a row: its place, without the values there, and what it says."""
    *sample, file, index, line = record
    return Row(Path(file), index, line, {}), Sample(*sample)


def _read(
    writer: TableWriter, rows: Iterator[Row], data: DataConfig, need_data_source: bool
) -> Iterator[int]:
    has_warned = False
    for row in rows:
        sample = parse_row(row, data, need_data_source=need_data_source)
        if not has_warned and row.values.get("tools") is not None:
            has_warned = True
            logger.warning(
                "%s, column 'tools': not used, there are no tool calls in a rollout; a reward gets "
                "it in extra_info, and data.apply_chat_template_kwargs.tools shows tools to the "
                "model",
                row.where,
            )
        writer.add_row((*sample, str(row.file), row.index, row.line))
        yield writer.num_rows


def rows_of(files: str | Sequence[str], data: DataConfig, split: Split) -> Iterator[Row]:
    """Rows of the files, or of the task `tiny`, as many as the split takes. Raises DataError."""
    limit = data.train_max_samples if split == "train" else data.val_max_samples
    if is_tiny(files):
        rows = (
            Row(Path("tiny"), i, None, row) for i, row in enumerate(tiny_rows(split, data.seed))
        )
    else:
        rows = (row for path in find_files(files) for row in read_rows(path))
    return islice(rows, limit) if limit > 0 else rows


def tokenized(
    rows: Sequence[tuple[Row, Sample]],
    tokenizer: "PreTrainedTokenizerBase",
    data: DataConfig,
) -> list[list[int]]:
    """Token ids of the rows' prompts in the chat template, uncut. Raises DataError.

    A text that is far too long may lack its middle; it is too long still.
    """
    texts = [_render(row, sample, tokenizer, data) for row, sample in rows]
    found = token_ids(tokenizer, [_without_middle(text, data) for text in texts])
    for index, (text, ids) in enumerate(zip(texts, found, strict=True)):
        if text != _without_middle(text, data) and len(ids) <= 4 * data.max_prompt_length:
            found[index] = token_ids(tokenizer, [text])[0]
    return found


def _without_middle(text: str, data: DataConfig) -> str:
    """A text that is surely too long, cut: a line of 100 MB would be tokenized for minutes.

    What truncation keeps stands in the rest, as many tokens from either end as fit.
    """
    end = CHARS_PER_TOKEN * data.max_prompt_length
    return text if len(text) <= 2 * end else text[:end] + text[-end:]


def _render(
    row: Row, sample: Sample, tokenizer: "PreTrainedTokenizerBase", data: DataConfig
) -> str:
    options = {"add_generation_prompt": True, **data.apply_chat_template_kwargs}
    try:
        return render_chat(tokenizer, sample.messages, **options)
    except InputError as error:
        raise row.error(str(error), data.prompt_key) from error


def check_ids(
    ids: list[int],
    row: Row,
    tokenizer: "PreTrainedTokenizerBase",
    data: DataConfig,
    vocabulary: int | None,
) -> None:
    """Raise DataError for a prompt that no engine could take."""
    if not ids:
        raise row.error("the tokenizer makes no token of it", data.prompt_key)
    if vocabulary is not None and max(ids) >= vocabulary:
        token = tokenizer.convert_ids_to_tokens(max(ids))
        raise row.error(
            f"its token {token!r} has the id {max(ids)}; the model has {vocabulary} ids only, the "
            f"tokenizer {len(tokenizer)}: enlarge the model's embedding (transformers' "
            "resize_token_embeddings), or use the model's own tokenizer (model.tokenizer_path)",
            data.prompt_key,
        )


def fitted(ids: list[int], row: Row, data: DataConfig) -> list[int] | None:
    """The ids within data.max_prompt_length; None = leave the prompt out."""
    limit = data.max_prompt_length
    if len(ids) <= limit:
        return ids
    if data.filter_overlong_prompts:
        return None
    match data.truncation:
        case "left":
            return ids[-limit:]
        case "right":
            return ids[:limit]
        case "middle":
            return ids[: limit // 2] + ids[-(limit - limit // 2) :]
        case "error":
            least = "at least " if len(ids) > 4 * limit else ""
            raise row.error(
                f"has {least}{len(ids)} tokens with the chat template, more than "
                f"data.max_prompt_length = {limit}; raise it, or set "
                "data.filter_overlong_prompts=true or data.truncation",
                data.prompt_key,
            )
