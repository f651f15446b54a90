"""Shares of data sources and files in the prompts of an epoch (data.mix).

Owns which prompts a name means, and whose turn it is. Must not know batches or ranks.
"""

import glob
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import NamedTuple

import numpy as np

from ppo.data.dataset import Prompts, kinds_of
from ppo.data.facts import Kind
from ppo.data.rows import DataError


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
    owner: dict[int, str] = {}
    for name in weights:
        found = [number for number, kind in enumerate(kinds) if _means(name, kind)]
        if not found:
            sources = ", ".join(map(repr, sorted({kind.source for kind in kinds})))
            problem = "neither a data source nor a file of the training prompts"
            raise DataError(f"data.mix.{name}", f"{problem}; the data sources are {sources}")
        for number in found:
            if number in owner:
                problem = f"means {_described(kinds[number])}, as data.mix.{owner[number]} does"
                raise DataError(f"data.mix.{name}", problem)
            owner[number] = name
    left = [kind for number, kind in enumerate(kinds) if number not in owner]
    if left:
        problem = f"has no weight for {_described(left[0])}; 0 leaves prompts out"
        raise DataError("data.mix", problem)
    return [
        Part(name, weight, np.flatnonzero(np.isin(kind_of, [k for k in owner if owner[k] == name])))
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


def _means(name: str, kind: Kind) -> bool:
    if name == kind.source:
        return True
    name, file = os.path.expanduser(name), kind.file
    if not file:
        return False
    return os.path.realpath(name) == os.path.realpath(file) or (
        glob.has_magic(name) and fnmatch(file, name)
    )


def _described(kind: Kind) -> str:
    where = f" in {kind.file}" if kind.file else ""
    return f"data source {kind.source!r}{where}"
