"""What a tracker does, and how one that fails or hangs costs the training nothing.

Owns the contract, and the thread that a tracker of somebody else's service lives in. Must not know
which trackers there are.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

logger = logging.getLogger(__name__)

MOST_WAITING = 1000
"""calls that wait for a tracker; of what comes then the tracker gets nothing"""
CLOSE_S = 60.0
"""how long the end of a run waits for a tracker"""


class About(NamedTuple):
    """What a tracker is told of a run when it begins."""

    folder: Path
    project: str
    experiment: str
    config: Mapping[str, Any] = {}
    """by dotted key"""
    run_id: str | None = None
    """of the tracker, from an earlier start of this run; None = a new run"""
    first_step: int = 0
    """what an earlier start wrote of this step or a later one is forgotten"""


class Bins(NamedTuple):
    """A distribution: counts of equal bins between low and high, and the values themselves."""

    low: float
    high: float
    counts: list[int]
    values: Sequence[float]

    @property
    def edges(self) -> list[float]:
        """One more than there are bins."""
        width = (self.high - self.low) / len(self.counts) or 1.0 / len(self.counts)
        return [self.low + index * width for index in range(len(self.counts) + 1)]


class Board(Protocol):
    """A tracker of one run. Metrics have the names that they have in metrics.jsonl."""

    @property
    def run_id(self) -> str | None:
        """What it needs to go on with this run after a restart; None = nothing."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of a step; after a resume steps may come again."""
        ...

    def samples(self, step: int, split: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Samples as text or as a table."""
        ...

    def histogram(self, step: int, name: str, bins: Bins) -> None:
        """A distribution."""
        ...

    def close(self, *, failed: bool) -> None:
        """The end of this start."""
        ...


class Background:
    """A tracker in a thread of its own: what it does, or does not do, the training goes on.

    The first failure is a warning, later ones are in the log's debug level. `keep_id` is given
    the tracker's run id once it is known.
    """

    run_id = None

    def __init__(
        self, name: str, open_board: Callable[[], Board], keep_id: Callable[[str], None]
    ) -> None:
        self._name, self._open, self._keep_id = name, open_board, keep_id
        self._calls: queue.Queue[Callable[[Board], None] | None] = queue.Queue(MOST_WAITING)
        self._has_warned = self._is_dead = False
        self._failed = False
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Without the values that are not finite."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._put(lambda board: board.log(step, finite))

    def samples(self, step: int, split: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """As Board."""
        self._put(lambda board: board.samples(step, split, rows))

    def histogram(self, step: int, name: str, bins: Bins) -> None:
        """As Board."""
        self._put(lambda board: board.histogram(step, name, bins))

    def close(self, *, failed: bool) -> None:
        """Wait for what it has been given, CLOSE_S at most."""
        self._failed = failed
        if not self._is_dead:
            self._put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._say(f"is not ready after {CLOSE_S:.0f} s, and left alone", None)

    def _put(self, call: Callable[[Board], None] | None) -> None:
        if self._is_dead:
            return
        try:
            self._calls.put(call, timeout=CLOSE_S if call is None else None, block=call is None)
        except queue.Full:
            self._say("is too slow: it does not get everything", None)

    def _work(self) -> None:
        try:
            board = self._open()
            if board.run_id is not None:
                self._keep_id(board.run_id)
        except (Exception, SystemExit) as error:  # another project's code, and a network: anything
            self._is_dead = True
            self._say("could not be started, and gets nothing", error)
            return
        while (call := self._calls.get()) is not None:
            self._try(lambda call=call: call(board))
        self._try(lambda: board.close(failed=self._failed))

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (Exception, SystemExit) as error:  # as above
            self._say("failed (said once; the run goes on)", error)

    def _say(self, what: str, error: BaseException | None) -> None:
        level = logging.DEBUG if self._has_warned else logging.WARNING
        self._has_warned = True
        reason = "" if error is None else f": {type(error).__name__}: {error}"
        logger.log(level, "trainer.logger: %s %s%s", self._name, what, reason)
        logger.debug("%s", self._name, exc_info=error)


def as_text(row: Mapping[str, Any], name: str) -> str:
    """A column of a sample as valid text."""
    value = row.get(name)
    return "" if value is None else str(value).encode("utf-8", "replace").decode()


SAMPLE_COLUMNS = ("data_source", "prompt", "response", "score", "ground_truth", "finish_reason")
"""of a table of samples"""


def as_table(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Samples with SAMPLE_COLUMNS: text, and the score as a number or None."""
    return [
        [row.get(name) if name == "score" else as_text(row, name) for name in SAMPLE_COLUMNS]
        for row in rows
    ]
