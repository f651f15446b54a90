"""Prompts of a run, in their order.

Owns what a prompt is, and where the prompts of a split come from: files, or a class of the user.
Must not know batches, order or ranks: every rank has the same.
"""

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ppo.config import DataConfig
from ppo.data.columns import Sample
from ppo.data.facts import Facts, Kind
from ppo.data.reading import Split, read_prompts, unpacked
from ppo.data.table import Table
from ppo.plugin import PluginError, load_plugin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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

    They are kept in a file (`table.py`), and a `Prompt` is made whenever it is asked for.

    Args:
        split: `val` reads data.val_max_samples instead of data.train_max_samples.
        need_data_source: False where a scorer of the user does without that column.
        vocabulary: token ids of the model; None = not known.

    Raises:
        DataError: names file, row and column.
        InputError: the prompts cannot be kept.
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
        self.table = _result_of(
            read_prompts(
                files,
                tokenizer,
                data,
                split=split,
                need_data_source=need_data_source,
                vocabulary=vocabulary,
            )
        )

    @classmethod
    def of(cls, table: Table) -> "PromptDataset":
        """The prompts of a table that `read_prompts` has made, here or in another process."""
        dataset = cls.__new__(cls)
        dataset.table = table
        return dataset

    @property
    def facts(self) -> Facts:
        """What is known of all of them."""
        return self.table.place.facts

    @property
    def num_filtered(self) -> int:
        """Rows that are left out."""
        return self.table.place.num_rows - len(self)

    def __len__(self) -> int:
        return self.facts.num_prompts

    def __getitem__(self, index: int, /) -> Prompt:
        index = range(len(self))[index]
        row, sample = unpacked(self.table.row(index))
        return Prompt(
            uid=self.table.number(index),
            prompt_ids=self.table.ids(index),
            data_source=sample.data_source,
            ground_truth=sample.ground_truth,
            extra_info=sample.extra_info,
            messages=sample.messages,
            where=row.where,
        )


def _result_of(steps: Generator[object, None, Table]) -> Table:
    """What a generator returns, once it is through."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def facts_of(prompts: Prompts) -> Facts:
    """What is known of all prompts; of a class of the user, after going through them."""
    if type(prompts) is PromptDataset:  # a class of the user may be made of it
        return prompts.facts
    facts = Facts()
    for index in range(len(prompts)):
        prompt = prompts[index]
        asked = prompt.messages, prompt.data_source, prompt.ground_truth, prompt.extra_info
        facts.add(Sample(*asked), len(prompt.prompt_ids))
    return facts


def kinds_of(prompts: Prompts) -> tuple[list[Kind], np.ndarray]:
    """The kinds of prompts there are, and the number of each prompt's kind."""
    if type(prompts) is PromptDataset:
        return list(prompts.facts.kinds), prompts.table.kinds
    found: dict[Kind, int] = {}
    kinds = (Kind("", prompts[index].data_source) for index in range(len(prompts)))
    numbers = np.array([found.setdefault(kind, len(found)) for kind in kinds])
    return list(found), numbers


def custom_dataset(
    files: str | Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    data: DataConfig,
    *,
    split: Split = "train",
    vocabulary: int | None = None,
) -> Prompts:
    """The dataset class of the user, data.custom_cls, called as cls(files, tokenizer, data,
    split=split).

    Its prompts may have no token that is not of `vocabulary`, where the model's is known. Raises
    PluginError.
    """
    custom = data.custom_cls
    assert custom.path is not None
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
