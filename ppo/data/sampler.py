"""The order of prompts: seeded, the same on every rank, and where a restart goes on.

Owns epochs and batches. Must not know ranks: every rank draws the same global batch.
"""

import logging
import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ppo.data.dataset import Prompt, Prompts, facts_of
from ppo.data.difficulty import Difficulty
from ppo.data.mix import parts_of, turns
from ppo.data.rows import DataError

logger = logging.getLogger(__name__)


class PromptSampler:
    """Batches of prompts without end, epoch after epoch; the trainer decides when to stop.

    Without mix and difficulty an epoch is a pass over the prompts. With one of them it is as many
    prompts as those that it draws from: each part is gone through pass after pass, whatever the
    epochs, and the parts take turns (`mix.turns`), the same in each epoch.

    Args:
        batch_size: prompts of a global batch.
        shuffle: a new order in each pass, a function of (seed, pass).
        drop_last: leave out the short last batch of an epoch (said once) instead of using it.
        epochs: after which `has_next` says that there is no more; None = never.
        batch_key: the key of the batch size, for messages.
        mix: weights by data source or file; empty = the prompts as they are.
        difficulty: which prompts come less often; None = none.

    Raises:
        DataError: fewer prompts than one batch, with drop_last; a mix that fits them not.
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
        mix: Mapping[str, float] | None = None,
        difficulty: Difficulty | None = None,
    ) -> None:
        self._dataset = dataset
        self._epochs = epochs
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._checksum = facts_of(dataset).checksum
        self._difficulty = difficulty
        self._last: dict[int, int] = {}  # prompts of the last batch: uid -> number
        parts = parts_of(dataset, mix) if mix else []
        numbers: list[Iterable[int]] = [part.prompts for part in parts] or [range(len(dataset))]
        names = [f"{seed}-{part.name}" for part in parts] or [f"{seed}"]
        skips = difficulty.skips if difficulty is not None else None
        self._passes = [
            _Passes(own, name if shuffle else None, skips)
            for own, name in zip(numbers, names, strict=True)
        ]
        self._is_plain = not mix and difficulty is None
        self._size = sum(len(part) for part in self._passes)
        self._turns = turns([p.weight for p in parts], self._size) if len(parts) > 1 else None
        self._epoch = self._position = 0  # position: prompts of the epoch that were drawn
        self._say_what_is_left_out(batch_key)

    def _say_what_is_left_out(self, batch_key: str) -> None:
        size, batch_size = self._size, self._batch_size
        rest = size % batch_size
        if len(self) == 0:
            raise DataError(
                "data.train_files",
                f"hold {size} usable prompts, fewer than {batch_key} = {batch_size}; add "
                "data, lower it, or set data.drop_last=false",
            )
        if rest and self._drop_last and self._is_plain:
            logger.warning(
                "data.drop_last: the last %d of %d prompts of each epoch's order are not used "
                "(batches of %d)",
                *(rest, size, batch_size),
                extra={"every_rank": True},
            )

    def __len__(self) -> int:
        """Batches of one epoch."""
        full, rest = divmod(self._size, self._batch_size)
        return full + bool(rest and not self._drop_last)

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that the last batch was drawn from."""
        return self._epoch

    @property
    def pooled(self) -> float | None:
        """Share of the prompts that come less often; None without difficulty."""
        return None if self._difficulty is None else self._difficulty.pooled

    def has_next(self) -> bool:
        """Whether the epochs hold another batch."""
        return self._epochs is None or self._epoch + 1 < self._epochs or not self._is_exhausted()

    def next_batch(self) -> list[Prompt]:
        """The next global batch; the last of an epoch may be short unless drop_last."""
        if self._is_exhausted():
            self._epoch, self._position = self._epoch + 1, 0
            if self._is_plain:
                self._passes[0].begin(self._epoch)
        end = min(self._position + self._batch_size, self._size)
        whose = [0] * (end - self._position)
        if self._turns is not None:
            whose = self._turns[self._position : end].tolist()
        chosen = [self._passes[part].next() for part in whose]
        self._position = end
        prompts = [self._dataset[number] for number in chosen]
        self._last = {prompt.uid: number for prompt, number in zip(prompts, chosen, strict=True)}
        return prompts

    def note(self, prompts: Sequence[Prompt], right: Sequence[bool | None]) -> None:
        """Whether all responses to each prompt of the last batch were right; None = not known."""
        if self._difficulty is not None:
            seen = zip(prompts, right, strict=True)
            self._difficulty.note((self._last[p.uid], r) for p, r in seen if r is not None)

    @property
    def wants_notes(self) -> bool:
        """Whether `note` has an effect."""
        return self._difficulty is not None

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch starts, and what the position counts in."""
        state = {
            "epoch": self._epoch,
            "position": self._position,
            "num_prompts": len(self._dataset),
            "checksum": self._checksum,
        }
        if not self._is_plain:
            state["passes"] = [[part.number, part.position] for part in self._passes]
        if self._difficulty is not None:
            state["streaks"] = self._difficulty.state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
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
        self._epoch, self._position = state["epoch"], state["position"]
        if self._is_plain:
            self._passes[0].begin(self._epoch, self._position)
        else:
            self._load_passes(state)

    def _load_passes(self, state: Mapping[str, Any]) -> None:
        """Of a state that had other parts nothing is taken over but the epoch, and that is said."""
        passes = state.get("passes", [])
        try:
            if len(passes) != len(self._passes):
                raise ValueError(f"of {len(passes)} parts, not {len(self._passes)}")
            for part, (number, position) in zip(self._passes, passes, strict=True):
                part.begin(number, position)
            if self._difficulty is not None and "streaks" in state:
                self._difficulty.load(state["streaks"])
        except ValueError as error:
            logger.warning(
                "data.mix, data.difficulty: the state of the checkpoint is %s: they begin anew",
                error,
                extra={"every_rank": True},
            )

    def _is_exhausted(self) -> bool:
        rest = self._size - self._position
        return rest < (self._batch_size if self._drop_last else 1)


class _Passes:
    """Some prompts in one order after the other, without end."""

    def __init__(
        self, prompts: Iterable[int], seed: str | None, skips: Callable[[int, int], bool] | None
    ) -> None:
        """seed: of the shuffles; None = in order. skips: prompts that a pass leaves out."""
        self._prompts, self._seed, self._skips = prompts, seed, skips
        self.begin(0)

    def __len__(self) -> int:
        """Prompts of a pass, those that are left out too."""
        return len(self._order)

    def begin(self, number: int, position: int = 0) -> None:
        """Go on at a place of a pass."""
        self.number, self.position = number, position
        self._order = array("q", self._prompts)
        if self._seed is not None:
            random.Random(f"{self._seed}-{number}").shuffle(self._order)

    def next(self) -> int:
        """The next prompt that is not left out; after the last of a pass another begins."""
        while True:
            if self.position >= len(self._order):
                self.begin(self.number + 1)
            prompt = self._order[self.position]
            self.position += 1
            if self._skips is None or not self._skips(prompt, self.number):
                return prompt
