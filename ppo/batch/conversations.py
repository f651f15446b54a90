"""A sample that is an episode of several turns: its rows in a batch, and what came of it.

Owns what is learned from and what is only read. Must not know where episodes run, ranks or models.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Segment(NamedTuple):
    """One row: a prompt, and T tokens behind it, some sampled and some observed.

    The tokens and their log-probs stand in the completions of the samples.
    """

    prompt_ids: list[int]
    learned: np.ndarray  # bool [T]: sampled by the policy, and learned from in no other row
    rewards: np.ndarray  # float32 [T], of turns, at the last sampled token of each

    @property
    def length(self) -> int:
        """T."""
        return len(self.learned)


class Conversation(NamedTuple):
    """What an episode was. It has one row at least, if only its prompt."""

    segments: list[Segment]
    score: float | None = None  # that the episode has given itself; None: rewards score its text
    extra: Mapping[str, float] = {}  # other numbers that came with it
    failed: str | None = None  # error or timeout: it has no score, and nothing of it counts
    reason: str = ""  # of a failed one
    counts: Mapping[str, int] = {}  # turns, calls of tools, ...
    messages: Sequence[Any] = ()  # for people
    tape: Sequence[Any] = ()  # from which the episode can be repeated
    key: str = ""  # that names it among those of the run

    @property
    def turn_rewards(self) -> float:
        """Of all turns together, beside the score."""
        return float(sum(segment.rewards.sum() for segment in self.segments))
