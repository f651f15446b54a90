"""The prompts of a run, training and validation."""

import logging
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ppo.config import Config
from ppo.data.dataset import Prompt, Prompts
from ppo.data.difficulty import Difficulty
from ppo.data.sampler import PromptSampler

if TYPE_CHECKING:  # --check answers without the seconds that transformers takes
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


class PromptSets(NamedTuple):
    """Tokenizer and prompts of a run."""

    tokenizer: "PreTrainedTokenizerBase"
    train: Prompts
    val: Mapping[str, Prompts]
    """the sets of data.val_sets by name; that of data.val_files has the empty name"""
    num_ids: int
    """ids from 0 on that tokenizer and model both have, where the model's are known"""

    def sets(self) -> list[Prompts]:
        """Training prompts, then those of each validation set."""
        return [self.train, *self.val.values()]

    def all(self) -> Iterator[Prompt]:
        """Training prompts, then validation prompts."""
        for prompts in self.sets():
            yield from (prompts[index] for index in range(len(prompts)))

    def sampler(self, config: Config) -> PromptSampler:
        """The order of the training prompts, in batches of one generation."""
        data, filters = config.data, config.algorithm.filter_groups.enable
        by_epochs = config.trainer.total_training_steps is None
        return PromptSampler(
            self.train,
            batch_size=data.gen_batch_size if filters else data.train_batch_size,
            shuffle=data.shuffle,
            seed=data.seed,
            drop_last=data.drop_last,
            epochs=config.trainer.total_epochs if by_epochs else None,
            batch_key="data.gen_batch_size" if filters else "data.train_batch_size",
            mix=data.mix,
            difficulty=None
            if data.difficulty.pool is None
            else Difficulty(
                len(self.train),
                share=data.difficulty.pool,
                visits=data.difficulty.visits,
                seed=data.seed,
            ),
        )


def shared_ids(tokenizer: "PreTrainedTokenizerBase", vocabulary: int | None) -> int:
    """Ids from 0 on that the model has and the tokenizer's largest id covers."""
    known = set(tokenizer.get_vocab().values())
    number = min(max(known) + 1, vocabulary or sys.maxsize)
    if number <= max(known):
        logger.warning(
            "the tokenizer has ids up to %d (%r), and the model has %d ids: the others are never "
            "sampled; enlarge its embedding (transformers' resize_token_embeddings), or use the "
            "model's own tokenizer (model.tokenizer_path)",
            *(max(known), tokenizer.convert_ids_to_tokens(max(known)), number),
        )
    missing = number - sum(i < number for i in known)
    if missing:
        logger.warning(
            "the tokenizer has no token for %d of the ids 0 to %d: they can be sampled",
            missing,
            number - 1,
        )
    return number


def total_steps_of(config: Config, sampler: PromptSampler) -> int:
    """Iterations of the run: trainer.total_training_steps, else all of trainer.total_epochs.

    With filter_groups the epochs hold so many at most: the run ends with their last prompts.
    """
    epochs = config.trainer.total_epochs * len(sampler)
    if config.algorithm.filter_groups.enable:
        prompts = epochs * config.data.gen_batch_size
        epochs = min(epochs, -(-prompts // config.data.train_batch_size))
    return config.trainer.total_training_steps or epochs
