"""Ends a rank whose engine makes no progress: nothing else could, the engine is in its thread.

Owns one daemon thread. Must not know the engine. A hang in a kernel or a collective cannot be
raised out of; the stacks of all threads are written down, and the process ends.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sharding.progress import in_debugger

LOOKS_PER_LIMIT = 20
LONGEST_LOOK_S = 1.0


def end_process(text: str) -> None:
    """What a program does that has nobody to tell."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
    os._exit(1)


class StallWatch:
    """Watches whoever is inside of `over`, until `close`."""

    def __init__(self, *, rank: int, log: Path, give_up: Callable[[str], object]) -> None:
        """log: where the stacks go. give_up: told why; ends the process."""
        self._rank, self._log, self._end = rank, log, give_up
        self._beaten, self._limit, self._what = time.monotonic(), 0.0, ""
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, daemon=True, name="sglang-stall")
        self._thread.start()

    @contextmanager
    def over(self, what: str, limit_s: float) -> Iterator[None]:
        """The block may take so long between two beats."""
        with self._changed:
            self._beaten, self._limit, self._what = time.monotonic(), limit_s, what
            self._changed.notify()
        try:
            yield
        finally:
            self._limit = 0.0

    def beat(self) -> None:
        """Something has been done."""
        self._beaten = time.monotonic()

    def close(self) -> None:
        """The thread ends."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        while True:
            with self._changed:
                most = self._limit / LOOKS_PER_LIMIT or LONGEST_LOOK_S
                self._changed.wait(min(LONGEST_LOOK_S, most))
                if self._closed:
                    return
            if in_debugger():
                self.beat()
            limit = self._limit
            if limit and time.monotonic() - self._beaten > limit:
                self._report(limit)
                return

    def _report(self, limit_s: float) -> None:
        text = (
            f"rank {self._rank}: the SGLang engine made no progress for {limit_s:g} s in "
            f"{self._what}; the stacks of its threads are in {self._log}"
        )
        with self._log.open("a") as log:
            log.write(text + "\n")
            log.flush()
            faulthandler.dump_traceback(log, all_threads=True)
        self._end(text)
