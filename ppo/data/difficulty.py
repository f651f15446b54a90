"""Prompts that the policy has learned come less often (data.difficulty).

Owns how often each prompt was answered right at its last visits, one byte a prompt, and when one
that always was is due again. Must not know batches, scores or ranks.
"""

import base64
import zlib
from collections.abc import Iterable

import numpy as np


class Difficulty:
    """The pool of prompts to which all responses were right at the last `visits` visits.

    A prompt of the pool keeps a share of its turns: at pass e it comes where frac(e x share + u) is
    below the share, with a number u of its own. So it comes every 1/share-th pass, and a pass has
    about the same share of the pool. One wrong response takes it out.
    """

    def __init__(self, num_prompts: int, *, share: float, visits: int, seed: int) -> None:
        self._share, self._visits, self._seed = share, visits, seed
        self._streaks = np.zeros(num_prompts, np.uint8)

    def skips(self, prompt: int, number: int) -> bool:
        """Whether the prompt is left out of the pass with this number."""
        if self._streaks[prompt] < self._visits:
            return False
        own = zlib.crc32(f"{self._seed}-{prompt}".encode()) / 2**32
        return (number * self._share + own) % 1.0 >= self._share

    def note(self, visits: Iterable[tuple[int, bool]]) -> None:
        """Prompts that were visited, and whether all responses were right."""
        for prompt, right in visits:
            streak = min(int(self._streaks[prompt]) + 1, self._visits) if right else 0
            self._streaks[prompt] = streak

    @property
    def pooled(self) -> float:
        """Share of all prompts that are in the pool."""
        return float((self._streaks >= self._visits).mean())

    def state(self) -> str:
        """The streaks as text: a few bits of a prompt."""
        return base64.b64encode(zlib.compress(self._streaks.tobytes(), 1)).decode()

    def load(self, state: str) -> None:
        """Put `state` back. Raises ValueError where it is of other prompts."""
        found = np.frombuffer(zlib.decompress(base64.b64decode(state)), np.uint8)
        if len(found) != len(self._streaks):
            raise ValueError(f"of {len(found)} prompts, not {len(self._streaks)}")
        self._streaks = np.minimum(found, self._visits).astype(np.uint8)
