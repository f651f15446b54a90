"""Prompts of a run: rows of the data files as token ids, filtered or cut to length.

Owns how a row becomes a prompt. Must not know batches, order or ranks: every rank holds the same.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from ppo.config import DataConfig
from ppo.data.columns import CHARS_PER_TOKEN, Sample, is_tiny, parse_row
from ppo.data.rows import DataError, Row, find_files, read_rows
from ppo.data.tiny import tiny_rows
from ppo.data.tokenizer import render_chat, token_ids
from ppo.errors import InputError
from ppo.plugin import PluginError, load_plugin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Split = Literal["train", "val"]
TOKENIZE_ROWS = 1000
"""rows tokenized in one call"""


class Prompt(NamedTuple):
    """One prompt, ready to generate from."""

    uid: int  # index of its row over all files of the split, before filtering
    prompt_ids: list[int]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    messages: list[dict[str, str]] | str  # as written in the row
    where: str = ""  # file and row, for messages


class Prompts(Protocol):
    """What a dataset class of the user (`data.custom_cls`) has to offer."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Prompt: ...


class PromptDataset:
    """Prompts of parquet or JSONL files, or of the built-in task `tiny`.

    A plain-text prompt becomes one user message. The chat template is always applied, with the
    generation prompt. Prompts over data.max_prompt_length tokens are left out
    (data.filter_overlong_prompts), else treated as data.truncation says.

    Args:
        split: `val` reads data.val_max_samples instead of data.train_max_samples.
        need_data_source: False where a scorer of the user does without that column.
        vocabulary: token ids of the model; None = not known.

    Raises:
        DataError: names file, row and column.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: "PreTrainedTokenizerBase",
        data: DataConfig,
        *,
        split: Split = "train",
        need_data_source: bool = True,
        vocabulary: int | None = None,
    ) -> None:
        limit = data.train_max_samples if split == "train" else data.val_max_samples
        rows = _load_rows(files, data, split, limit)
        samples = [parse_row(row, data, need_data_source=need_data_source) for row in rows]
        _warn_of_tools(rows)
        self._prompts: list[Prompt] = []
        for start in range(0, len(rows), TOKENIZE_ROWS):
            chunk = slice(start, start + TOKENIZE_ROWS)
            tokenized = _tokenize(rows[chunk], samples[chunk], tokenizer, data)
            for uid, ids in enumerate(tokenized, start):
                _check_ids(ids, rows[uid], tokenizer, data, vocabulary)
                kept = _fit(ids, rows[uid], data)
                if kept is not None:
                    self._prompts.append(_prompt(uid, kept, rows[uid], samples[uid]))
        self.num_filtered = len(rows) - len(self._prompts)
        if self.num_filtered:
            logger.info(
                "%s data: %d of %d prompts are longer than data.max_prompt_length = %d tokens "
                "and left out",
                split,
                self.num_filtered,
                len(rows),
                data.max_prompt_length,
            )
        if not self._prompts:
            raise DataError(
                rows[0].file,
                f"every prompt is longer than data.max_prompt_length = {data.max_prompt_length}",
            )

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int, /) -> Prompt:
        return self._prompts[index]


def build_dataset(
    files: str | Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    data: DataConfig,
    *,
    split: Split = "train",
    need_data_source: bool = True,
    vocabulary: int | None = None,
) -> Prompts:
    """The dataset of a split: `PromptDataset`, or the user's class in its place.

    A class of the user is called as cls(files, tokenizer, data, split=split). Its prompts too may
    have no token that is not of `vocabulary`, where the model's is known.
    """
    custom = data.custom_cls
    if custom.path is None:
        return PromptDataset(
            files,
            tokenizer,
            data,
            split=split,
            need_data_source=need_data_source,
            vocabulary=vocabulary,
        )
    if custom.name is None:
        raise PluginError("data.custom_cls.name: name the class in data.custom_cls.path")
    dataset = load_plugin(custom.path, custom.name)(files, tokenizer, data, split=split)
    for needed in ("__len__", "__getitem__"):
        if not hasattr(dataset, needed):
            raise PluginError(f"data.custom_cls: {custom.name} of {custom.path} has no {needed}")
    if len(dataset) == 0:
        raise PluginError(f"data.custom_cls: {custom.name} of {custom.path} holds no prompt")
    most = min(len(tokenizer), vocabulary or len(tokenizer))
    for index in range(len(dataset)):
        problem = _prompt_problem(dataset[index], data, vocabulary=most)
        if problem is not None:
            raise PluginError(
                f"data.custom_cls: item {index} of {custom.name} of {custom.path} {problem}"
            )
    return dataset


def _prompt_problem(prompt: Any, data: DataConfig, *, vocabulary: int) -> str | None:
    """Why generation could not take this item of a dataset class of the user."""
    if not isinstance(prompt, Prompt):
        return f"must be a ppo.data.dataset.Prompt, not {type(prompt).__name__}"
    ids = prompt.prompt_ids
    if not ids:
        return "has no tokens"
    if len(ids) > data.max_prompt_length:
        return f"has {len(ids)} tokens, over data.max_prompt_length = {data.max_prompt_length}"
    if min(ids) < 0 or max(ids) >= vocabulary:
        return f"has token ids from {min(ids)} to {max(ids)}: there are {vocabulary}"
    return None


def _load_rows(files: str | Sequence[str], data: DataConfig, split: Split, limit: int) -> list[Row]:
    if is_tiny(files):
        rows = [
            Row(Path("tiny"), i, None, row) for i, row in enumerate(tiny_rows(split, data.seed))
        ]
    else:
        rows = [row for path in find_files(files) for row in read_rows(path)]
    return rows[:limit] if limit > 0 else rows


def _warn_of_tools(rows: Sequence[Row]) -> None:
    first = next((row for row in rows if row.values.get("tools") is not None), None)
    if first is not None:
        logger.warning(
            "%s, column 'tools': not used, there are no tool calls in a rollout; a reward gets it "
            "in extra_info, and data.apply_chat_template_kwargs.tools shows tools to the model",
            first.where,
        )


def _tokenize(
    rows: Sequence[Row],
    samples: Sequence[Sample],
    tokenizer: "PreTrainedTokenizerBase",
    data: DataConfig,
) -> list[list[int]]:
    texts = [_render(*pair, tokenizer, data) for pair in zip(rows, samples, strict=True)]
    tokenized = token_ids(tokenizer, [_without_middle(text, data) for text in texts])
    for index, (text, ids) in enumerate(zip(texts, tokenized, strict=True)):
        if text != _without_middle(text, data) and len(ids) <= 4 * data.max_prompt_length:
            tokenized[index] = token_ids(tokenizer, [text])[0]
    return tokenized


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


def _check_ids(
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


def _fit(ids: list[int], row: Row, data: DataConfig) -> list[int] | None:
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


def _prompt(uid: int, ids: list[int], row: Row, sample: Sample) -> Prompt:
    return Prompt(
        uid=uid,
        prompt_ids=ids,
        data_source=sample.data_source,
        ground_truth=sample.ground_truth,
        extra_info=sample.extra_info,
        messages=sample.messages,
        where=row.where,
    )
