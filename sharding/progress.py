"""How far this process has come: its phase, what it has got done, the points it has passed, and how
much it has in hand.

Owns four facts that whoever watches the process reads from another thread. Must not know who reads
them. They are counted by the code that does the work: a thread that beats by itself says nothing
about the main thread.

Whatever may take long without a phase to its own counts what it gets done: micro-batches, buckets,
files, tokens. Waiting is no progress.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Of one process."""

    def __init__(self) -> None:
        self.done = 0
        """pieces of work of any kind; only its changes mean something"""
        self.place = 0
        """points passed that every rank passes in the same order: who has fewer is behind"""
        self.tokens = 0
        """of the micro-batch that is computed, or was last"""
        self.entered = threading.Event()
        """set when a phase begins, for who wants to hear of it at once"""
        self.left_in: str | None = None
        """the phases that an exception is on its way out of"""
        self._phases: list[str] = []

    @property
    def phase(self) -> str:
        """The phases of this moment, outermost first: step/gen/reshard; empty outside of all."""
        return "/".join(self._phases)

    def tick(self) -> None:
        """Something has been done. Any thread may say so."""
        self.done += 1

    def arrive(self) -> None:
        """The main thread is at a point that every rank passes. By itself it is no progress."""
        self.place += 1

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """The block is a phase, which every rank goes through; phases may stand inside others."""
        self.left_in = None
        self._phases.append(phase)
        self.entered.set()
        try:
            self._step()
            yield
        except BaseException:
            self.left_in = self.left_in or self.phase
            raise
        finally:
            self._phases.pop()
            self._step()

    def _step(self) -> None:
        self.tick()
        self.arrive()


PROGRESS = Progress()
"""of this process"""


def in_debugger() -> bool:
    """Whether a debugger holds the main thread: someone looks at it, and it hangs not."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module in ("pdb", "bdb") or module.startswith("pydevd"):
            return True
        frame = frame.f_back
    return False
