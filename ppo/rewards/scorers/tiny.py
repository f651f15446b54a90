"""Scorer of the `tiny` copy task of ppo/data/tiny.py: graded, so that any policy learns.

A text in, a number out.
"""

from collections import Counter

LETTERS = "abcdefgh"
"""of the texts that ppo/data/tiny.py makes, which may not import scorers: a test compares"""


def score(text: str, ground_truth: str) -> float:
    """How far `text` is a copy of `ground_truth`, 0 to 1; 1 only for an exact copy.

    A quarter each for characters that are of LETTERS and for letters held in common in any
    order, half for the right letter in the right place; all over the longer of the two lengths,
    so that stopping too early and too late both cost.
    """
    if not text:
        return 0.0
    longer = max(len(text), len(ground_truth))
    letters = sum(character in LETTERS for character in text)
    common = (Counter(text) & Counter(ground_truth)).total()
    placed = sum(a == b for a, b in zip(text, ground_truth, strict=False))
    return (0.25 * letters + 0.25 * common + 0.5 * placed) / longer
