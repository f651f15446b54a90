"""A batch of samples on its way through the pool, as the trainer sees it: poll, then results.

Owns waiting and results. Must not know processes.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from ppo.rewards.contract import RewardError, RewardRequest, RewardResult


@dataclass
class PoolState:
    """What the pool's thread and the threads that wait for it share."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    """guards `error`, the pool's queue and the results of its jobs"""
    error: str | None = None
    """why no sample can be scored any more"""


class RewardJob:
    """Scores of one batch, in the making."""

    def __init__(self, state: PoolState, requests: Sequence[RewardRequest]) -> None:
        self.requests = list(requests)
        self._state = state
        self._results: list[RewardResult | None] = [None] * len(self.requests)
        self.fatal: dict[int, str] = {}
        """sample -> why no sample like it can ever be scored"""
        self._missing = len(self.requests)

    @property
    def finished(self) -> dict[int, RewardResult]:
        """Samples that have a result so far."""
        with self._state.changed:
            return {i: result for i, result in enumerate(self._results) if result is not None}

    @property
    def failures(self) -> list[RewardResult]:
        """Samples that have failed so far."""
        return [result for result in self.finished.values() if result.failed]

    @property
    def results(self) -> list[RewardResult]:
        """One result per request, in order; only when done."""
        assert self._missing == 0, f"{self._missing} samples are not scored yet"
        return [result for result in self._results if result is not None]

    def poll(self, timeout_s: float | None) -> bool:
        """Wait up to `timeout_s` (None: for ever); whether all samples have a result.

        Raises RewardError when the pool cannot go on.
        """
        with self._state.changed:
            self._state.changed.wait_for(
                lambda: self._missing == 0 or self._state.error is not None, timeout_s
            )
            if self._missing and self._state.error is not None:
                raise RewardError(self._state.error)
            return self._missing == 0

    def finish(self, index: int, result: RewardResult, *, fatal: bool = False) -> None:
        """Called by the pool's thread, under its lock."""
        assert self._results[index] is None, f"sample {index} was scored twice"
        self._results[index] = result
        self._missing -= 1
        if fatal:
            self.fatal[index] = result.traceback
