"""Stop texts: whether the text of a response ends one of them.

Owns the window of tokens that has to be decoded for that. Must not know what a hit leads to.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

# Tokens decoded beyond the longest stop text: what a tokenizer does at the start of a text (drop a
# blank, show half a character) then lies outside the part that is searched.
_MARGIN = 8


class StopText:
    """Looks for texts at the end of responses, after every token."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def hits(self, responses: Sequence[list[int]], stops: Sequence[tuple[str, ...]]) -> list[bool]:
        """True for each response whose last token completes one of its texts."""
        found = [False] * len(responses)
        looked_at = [number for number, stop in enumerate(stops) if stop]
        if not looked_at:
            return found
        tails = [responses[number][-_window(stops[number]) :] for number in looked_at]
        texts = self._tokenizer.batch_decode(
            tails, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        for number, text in zip(looked_at, texts, strict=True):
            found[number] = any(stop in text for stop in stops[number])
        return found


@cache
def _window(stop: tuple[str, ...]) -> int:
    """Tokens that are decoded: a token stands for at least one byte."""
    return max(len(text.encode()) for text in stop) + _MARGIN
