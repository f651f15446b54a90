"""The order of prompts: seeded, the same on every rank, and where a restart goes on.

Owns epochs and batches. Must not know ranks: every rank draws the same global batch.
"""

import logging
import random
from array import array
from typing import Any

from ppo.data.dataset import Prompt, Prompts, facts_of
from ppo.data.rows import DataError

logger = logging.getLogger(__name__)


class PromptSampler:
    """Batches of prompts without end, epoch after epoch; the trainer decides when to stop.

    Args:
        batch_size: prompts of a global batch.
        shuffle: a new order in each epoch, a function of (seed, epoch).
        drop_last: leave out the short last batch of an epoch (said once) instead of using it.
        epochs: after which `has_next` says that there is no more; None = never.
        batch_key: the key of the batch size, for messages.

    Raises:
        DataError: fewer prompts than one batch, with drop_last.
    """

    def __init__(
        self,
        dataset: Prompts,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        epochs: int | None = None,
        batch_key: str = "data.train_batch_size",
    ) -> None:
        self._dataset = dataset
        self._epochs = epochs
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._checksum = facts_of(dataset).checksum
        self._position = 0  # prompts of the epoch that were drawn
        self._set_epoch(0)
        rest = len(dataset) % batch_size
        if len(self) == 0:
            raise DataError(
                "data.train_files",
                f"hold {len(dataset)} usable prompts, fewer than {batch_key} = {batch_size}; add "
                "data, lower it, or set data.drop_last=false",
            )
        if rest and drop_last:
            logger.warning(
                "data.drop_last: the last %d of %d prompts of each epoch's order are not used "
                "(batches of %d)",
                rest,
                len(dataset),
                batch_size,
                extra={"every_rank": True},
            )

    def __len__(self) -> int:
        """Batches of one epoch."""
        full, rest = divmod(len(self._dataset), self._batch_size)
        return full + bool(rest and not self._drop_last)

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that the last batch was drawn from."""
        return self._epoch

    def has_next(self) -> bool:
        """Whether the epochs hold another batch."""
        return self._epochs is None or self._epoch + 1 < self._epochs or not self._is_exhausted()

    def next_batch(self) -> list[Prompt]:
        """The next global batch; the last of an epoch may be short unless drop_last."""
        if self._is_exhausted():
            self._set_epoch(self._epoch + 1)
            self._position = 0
        chosen = self._order[self._position : self._position + self._batch_size]
        self._position += len(chosen)
        return [self._dataset[index] for index in chosen]

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch starts, and what the position counts in."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "num_prompts": len(self._dataset),
            "checksum": self._checksum,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the batch after which `state_dict` was called."""
        if state["num_prompts"] == len(self._dataset):
            if state.get("checksum", self._checksum) != self._checksum:
                logger.warning(
                    "the data changed since the checkpoint: as many prompts (%d), but other ones",
                    len(self._dataset),
                    extra={"every_rank": True},
                )
        else:
            logger.warning(
                "the data changed since the checkpoint: %d usable prompts, then %d; the order of "
                "epoch %d is another",
                len(self._dataset),
                state["num_prompts"],
                state["epoch"],
                extra={"every_rank": True},
            )
        self._position = state["position"]
        self._set_epoch(state["epoch"])

    def _is_exhausted(self) -> bool:
        rest = len(self._dataset) - self._position
        return rest < (self._batch_size if self._drop_last else 1)

    def _set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._order = array("q", range(len(self._dataset)))
        if self._shuffle:
            random.Random(f"{self._seed}-{epoch}").shuffle(self._order)
