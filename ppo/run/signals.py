"""Signals of a rank: each asks it to stop; a second Ctrl-C ends it at once.

Owns the handlers. Must not know what stopping means, or other ranks.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

CTRL_C = "Ctrl-C"
ECHO_S = 2.0
"""torchrun forwards the SIGINT that the terminal has sent to its ranks already: within so many
seconds it is the same Ctrl-C"""
LAST_WORDS_S = 3
"""what the end after a second Ctrl-C may take, on a file system that hangs"""
EXIT_INTERRUPTED = 128 + signal.SIGINT
_PR_SET_PDEATHSIG = 1


class SignalWatch:
    """Context manager of the main thread; the previous handlers come back at its end.

    SIGTERM, SIGUSR1 and the first SIGINT only set `stop_signal`, which the main thread looks at
    when it is safe. It may never get there, inside a collective whose partners are gone: at the
    second SIGINT a thread, woken by the C-level handler, kills all descendants of this process and
    ends it with 130.
    """

    def __init__(self, *, before_exit: Callable[[], None]) -> None:
        """`before_exit` runs in the thread, right before the process is ended."""
        self.stop_signal: str | None = None  # SIGTERM, SIGUSR1 or Ctrl-C, once one has arrived
        self._before_exit = before_exit
        self._interrupted_at: float | None = None
        self._previous: dict[int, Any] = {}
        self._pipe = (-1, -1)
        self._previous_wakeup_fd = -1

    def __enter__(self) -> SignalWatch:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._request_stop)
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True, name="signal-watch").start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._interrupted_at is not None:  # a second one is heard until the process is gone
            return
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        os.close(self._pipe[1])  # ends the thread
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _request_stop(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.stop_signal = CTRL_C  # also where SIGTERM has come before
        elif self.stop_signal != CTRL_C:
            self.stop_signal = signal.Signals(number).name

    def _watch(self) -> None:
        while received := os.read(self._pipe[0], 1):
            # A debugger with a handler of its own keeps Ctrl-C.
            own = signal.getsignal(signal.SIGINT) == self._request_stop
            if received[0] == signal.SIGINT and own:
                self._interrupt()
        os.close(self._pipe[0])

    def _interrupt(self) -> None:
        """In the thread: the main thread may not run Python for long."""
        if self._interrupted_at is None:
            self.stop_signal, self._interrupted_at = CTRL_C, time.monotonic()
            said = (
                "Ctrl-C: the run ends as soon as it can, saved unless trainer.save_freq = -1; "
                "a second one ends it at once"
            )
            logger.warning(said, extra={"every_rank": True})
        elif time.monotonic() - self._interrupted_at > ECHO_S:
            signal.alarm(LAST_WORDS_S)  # the kernel's word
            self._before_exit()
            kill_descendants()
            os._exit(EXIT_INTERRUPTED)


def stop_with_parent() -> None:
    """Ask this process to stop (SIGTERM) when its parent, torchrun's agent, dies.

    A killed agent would otherwise leave its ranks training, without anyone to end them. Linux only.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def descendants(pid: int) -> list[int]:
    """Process ids of all children, their children and so on; empty without /proc."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in file.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def kill_descendants() -> None:
    """End all that this process has started, now."""
    for pid in descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
