"""Rows of the embedded engine in cohorts of one length, each with a cache of transformers' own.

Serves what `kv_cache.py` cannot: layers that carry a state from token to token, attention that does
not go through transformers' AttentionInterface, masks of a family's own. Rows that start together
with prompts of one length stay of one length, so no padding ever reaches a state; cohorts take
their steps one after the other. Where such a cache is wrong too, a cohort keeps its tokens, and
each step reads them all. Owns those caches. Must not know requests, or when rows come and go.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from sharding.offload import to_device


class Cohort:
    """Rows of one length that started together, in the order in which they run."""

    def __init__(self, config: Any, copies: Sequence[int]):
        """config: of the text model; None = no cache. copies: rows of each prompt."""
        self.cache: Cache | None = None if config is None else DynamicCache(config=config)
        self.size = sum(copies)
        self._tokens: Tensor | None = None  # [r, q] so far, without a cache
        self._source = torch.arange(len(copies)).repeat_interleave(torch.tensor(copies))
        self._is_spread = self.size == len(copies)

    def all_tokens(self, input_ids: Tensor) -> Tensor:
        """[r, n]: those of the steps before, and these [r, q]."""
        before = [] if self._tokens is None else [self._tokens]
        self._tokens = torch.cat([*before, input_ids], 1)
        return self._tokens

    def spread(self, device: torch.device) -> None:
        """After its prefill: what each prompt has left, once for each of its rows."""
        if not self._is_spread:
            self._select(to_device(self._source, device))
            self._is_spread = True

    def keep(self, rows: Sequence[int], device: torch.device) -> None:
        """Drops all rows but these, in this order."""
        self._select(to_device(torch.tensor(rows, dtype=torch.int64), device))
        self.size = len(rows)

    def _select(self, rows: Tensor) -> None:
        if self.cache is not None:
            self.cache.reorder_cache(rows)  # pyright: ignore[reportArgumentType]
        if self._tokens is not None:
            self._tokens = self._tokens[rows]


class Part(NamedTuple):
    """What one forward takes: input_ids[rows, :length], behind what the cache holds."""

    cohort: Cohort
    rows: slice
    length: int


class Parts(NamedTuple):
    """The forwards of one step, in the order of the rows."""

    parts: list[Part]


class CohortCache:
    """At most `rows` rows at a time, of up to `columns` tokens."""

    def __init__(self, config: Any, *, rows: int, columns: int):
        """config: transformers' configuration of the model; None = tokens are kept alone."""
        self.rows, self.columns = rows, columns
        self._config = config and config.get_text_config(decoder=True)
        self._cohorts: list[Cohort] = []
        self._device = torch.device("cpu")

    def prefill(self, lengths: Sequence[int], copies: Sequence[int], device: torch.device) -> Parts:
        """Starts rows: prompts of `lengths`, with `copies` rows each; neighbours of one length are
        one cohort. The new rows follow the running ones, the copies of one prompt side by side.
        """
        self._settle()
        self._device = device
        parts, first = [], 0
        for length, group in groupby(zip(lengths, copies, strict=True), key=lambda p: p[0]):
            counts = [count for _, count in group]
            cohort = Cohort(self._config, counts)
            parts.append(Part(cohort, slice(first, first + len(counts)), length))
            self._cohorts.append(cohort)
            first += len(counts)
        return Parts(parts)

    def decode(self, positions: Tensor, longest: int) -> Parts:
        """One more token for every running row, at positions [R]: each cache knows its own."""
        self._settle()
        parts, first = [], 0
        for cohort in self._cohorts:
            parts.append(Part(cohort, slice(first, first + cohort.size), 1))
            first += cohort.size
        assert first == len(positions) and longest <= self.columns
        return Parts(parts)

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Drops all rows but `rows`, which go on in their order; returns it."""
        self._settle()
        order, first, cohorts = sorted(rows), 0, []
        for cohort in self._cohorts:
            mine = [row - first for row in order if first <= row < first + cohort.size]
            first += cohort.size
            if not mine:
                continue
            if len(mine) < cohort.size:
                cohort.keep(mine, self._device)
            cohorts.append(cohort)
        self._cohorts = cohorts
        return order

    def free(self) -> None:
        """Gives the caches back."""
        self._cohorts = []

    def _settle(self) -> None:
        for cohort in self._cohorts:
            cohort.spread(self._device)
