"""Stop texts: whether the text of a response ends one of them.

Owns the window of tokens that has to be decoded for that. Must not know what a hit leads to.
"""

from collections.abc import Sequence
from typing import Any

# Tokens decoded beyond the longest stop text: what a tokenizer does at the start of a text (drop a
# blank, show half a character) then lies outside the part that is searched.
_MARGIN = 8


class StopText:
    """Looks for the texts `stop` at the end of responses, after every token."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]):
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        # A token stands for at least one byte.
        self._window = max((len(text.encode()) for text in stop), default=0) + _MARGIN

    def hits(self, responses: Sequence[list[int]]) -> list[bool]:
        """True for each response whose last token completes a stop text."""
        if not self._stop or not responses:
            return [False] * len(responses)
        tails = [ids[-self._window :] for ids in responses]
        texts = self._tokenizer.batch_decode(
            tails, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return [any(stop in text for stop in self._stop) for text in texts]
