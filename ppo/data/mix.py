"""Shares of data sources and files in the prompts of an epoch (data.mix).

Owns whose turn it is. Must not know batches or ranks.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ppo.data.dataset import Prompts, kinds_of
from ppo.data.facts import kinds_by_name


class Part(NamedTuple):
    """The prompts that a name of data.mix means."""

    name: str
    weight: float
    prompts: np.ndarray
    """their numbers, ascending"""


def parts_of(dataset: Prompts, weights: Mapping[str, float]) -> list[Part]:
    """What data.mix draws from, in its order; a weight of 0 leaves the prompts out.

    Raises DataError: a name means no prompt, two mean the same, or prompts have no name.
    """
    kinds, kind_of = kinds_of(dataset)
    meant = kinds_by_name(kinds, weights)
    return [
        Part(name, weight, np.flatnonzero(np.isin(kind_of, meant[name])))
        for name, weight in weights.items()
        if weight > 0
    ]


def turns(weights: Sequence[float], size: int) -> np.ndarray:
    """[size] which part is next, by Webster's method: the k-th turn of a part of weight w comes at
    (k + 1/2) / w.

    A part has its share of the turns, to less than one, in every stretch from the beginning; all
    of them exactly where the shares of `size` are whole.
    """
    shares = np.asarray(weights, np.float64) / np.sum(weights)
    counts = np.ceil(shares * size).astype(np.int64) + 1
    times = np.concatenate([(np.arange(n) + 0.5) / w for n, w in zip(counts, shares, strict=True)])
    parts = np.repeat(np.arange(len(shares), dtype=np.int32), counts)
    return parts[np.argsort(times, kind="stable")][:size]
