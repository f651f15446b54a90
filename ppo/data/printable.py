"""Which token ids stand for text that can be printed.

Owns the rule. Must not know whose tokens they are.
"""

import unicodedata
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PrintableIds:
    """Which ids stand for printable text; each is looked at when it is first met."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", ends: Collection[int]) -> None:
        """ends: special ids that may end a response."""
        self._tokenizer, self._ends = tokenizer, frozenset(ends)
        self._known = torch.zeros(0, dtype=torch.int8)  # by id: 0 not met, 1 text, 2 none

    def __call__(self, ids: Tensor) -> Tensor:
        """bool of the shape of `ids`."""
        ids = ids.long()
        if ids.numel() and (missing := int(ids.max()) + 1 - len(self._known)) > 0:
            self._known = torch.nn.functional.pad(self._known, (0, missing))
        for new in ids.unique()[self._known[ids.unique()] == 0].tolist():
            self._known[new] = 1 if self._is_text(new) else 2
        return self._known[ids] == 1

    def _is_text(self, token: int) -> bool:
        if token in self._ends:
            return True
        if token in self._tokenizer.all_special_ids:
            return False
        return all(is_printable(letter) for letter in self._tokenizer.decode([token]))


def is_printable(letter: str) -> bool:
    """Whether a character is text: no control character, half of a character, or private one."""
    return letter in "\t\n\r" or (unicodedata.category(letter)[0] != "C" and letter != "\ufffd")
