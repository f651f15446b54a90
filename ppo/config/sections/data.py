"""Section data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from ppo.config.bounds import (
    Bound,
    FilePath,
    IntOrOff,
    Length,
    PositiveInt,
    Prompts,
    PythonName,
    Samples,
    Seed,
    Temperature,
    Text,
    TopP,
)
from ppo.config.fields import MayChange, Section, derived


@dataclass(frozen=True, kw_only=True)
class CustomClassConfig(Section):
    """A class of the user, loaded from a file."""

    path: FilePath | None = None
    """Python file; null = the built-in class"""
    name: PythonName | None = None
    """name of the class in that file"""


@dataclass(frozen=True, kw_only=True)
class ValSetConfig(Section):
    """One validation set with a name; what is null is rollout.val_kwargs', or section data's."""

    files: list[FilePath]
    """as data.train_files"""
    n: Samples | None = None
    """responses per prompt"""
    temperature: Temperature | None = None
    """0 = greedy"""
    top_p: TopP | None = None
    """nucleus; 1 = off"""
    max_response_length: Length | None = None
    """longest response, tokens"""


@dataclass(frozen=True, kw_only=True)
class DifficultyConfig(Section):
    """Prompts that the policy has learned come less often."""

    pool: Annotated[float, Bound(ge=0.01, le=1)] | None = None
    """how often a prompt of the pool comes, as a share of how often others do: 0.25 = in every
    fourth pass; null = there is no pool"""
    visits: Annotated[int, Bound(ge=1, le=255)] = 2
    """a prompt is in the pool when all responses at so many of its visits, one after the other, had
    a score of 1 or more; a wrong one takes it out"""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Prompts: where they are, how they are cut, how many make a step."""

    train_files: list[FilePath]
    """parquet or JSONL files: one, many, globs; `tiny` = a seeded copy task"""
    val_files: MayChange[list[FilePath]] = field(default_factory=list)
    """as train_files; empty = no validation"""
    val_sets: MayChange[dict[str, ValSetConfig]] = field(default_factory=dict)
    """validation sets by name, {NAME: {files, n, temperature, top_p, max_response_length}}: all
    but files may be left out, and follow rollout.val_kwargs and max_response_length; metrics
    val-core/NAME/SOURCE/..."""
    mix: dict[str, Annotated[float, Bound(ge=0, le=1e6)]] = field(default_factory=dict)
    """shares of the prompts of an epoch, {NAME: weight} for every data source, or training file;
    0 leaves its prompts out; empty = all prompts once"""
    difficulty: DifficultyConfig = field(default_factory=DifficultyConfig)
    """how often easy prompts come"""
    prompt_key: Text = "prompt"
    """column with the prompt: text, or a list of {role, content}"""
    reward_fn_key: Text = "data_source"
    """column that picks the scorer"""
    max_prompt_length: Length = 512
    """longest prompt, tokens"""
    max_response_length: Length = 512
    """longest response, tokens"""
    train_batch_size: Prompts = 1024
    """prompts of one iteration, over all ranks"""
    gen_batch_size: Prompts = derived("data.train_batch_size")
    """prompts of one round of algorithm.filter_groups, over all ranks; null =
    data.train_batch_size"""
    val_batch_size: MayChange[PositiveInt | None] = None
    """prompts generated at once in validation; null = all of a set"""
    shuffle: bool = True
    """shuffle the prompts anew in each epoch, seeded"""
    seed: Seed = derived("trainer.seed")
    """seed of that shuffle; null = trainer.seed"""
    drop_last: bool = True
    """drop the short last batch of an epoch (one warning) instead of using it"""
    filter_overlong_prompts: bool = True
    """drop prompts longer than max_prompt_length at load"""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """what happens to a prompt that is too long and not filtered; `left` cuts its start"""
    train_max_samples: IntOrOff = -1
    """use only the first so many training rows; -1 = all"""
    val_max_samples: MayChange[IntOrOff] = -1
    """use only the first so many rows of each validation set; -1 = all"""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """passed on to tokenizer.apply_chat_template"""
    custom_cls: CustomClassConfig = field(default_factory=CustomClassConfig)
    """dataset class of your own"""

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence: prompt and response."""
        return self.max_prompt_length + self.max_response_length

    @property
    def val_response_lengths(self) -> dict[str, int]:
        """Longest responses of validation sets that have their own, in tokens, by key."""
        own = {name: val.max_response_length for name, val in self.val_sets.items()}
        return {f"data.val_sets.{name}.max_response_length": n for name, n in own.items() if n}

    @property
    def longest_sampled(self) -> int:
        """Tokens of the longest sequence that an engine makes, in training or validation."""
        responses = (self.max_response_length, *self.val_response_lengths.values())
        return self.max_prompt_length + max(responses)
