"""Signals of a rank: SIGTERM and SIGUSR1 ask it to stop, SIGINT ends it within seconds.

Owns the handlers and the deadline. Must not know what stopping means, or other ranks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

INTERRUPT_GRACE_S = 5
_PR_SET_PDEATHSIG = 1


class SignalWatch:
    """Context manager of the main thread; the previous handlers come back at its end.

    After SIGINT the main thread gets a KeyboardInterrupt, once. It may be inside a collective whose
    partners are gone and never see it: after INTERRUPT_GRACE_S a thread, woken by the C-level
    handler, kills all descendants of this process and ends it with 130.
    """

    def __init__(self, *, before_exit: Callable[[], None]) -> None:
        """`before_exit` runs in the thread, right before the process is ended."""
        self.stop_signal: str | None = None  # SIGTERM or SIGUSR1, once one has arrived
        self._before_exit = before_exit
        self._interrupted = False
        self._previous: dict[int, Any] = {}
        self._pipe = (-1, -1)
        self._previous_wakeup_fd = -1

    def __enter__(self) -> SignalWatch:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            self._previous[number] = signal.signal(number, self._request_stop)
        self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True, name="signal-watch").start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._interrupted:  # the deadline holds until the process is gone
            return
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        os.close(self._pipe[1])  # ends the thread
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _request_stop(self, number: int, _frame: FrameType | None) -> None:
        self.stop_signal = signal.Signals(number).name

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if not self._interrupted:  # torchrun forwards what the terminal has sent already
            self._interrupted = True
            raise KeyboardInterrupt

    def _watch(self) -> None:
        while received := os.read(self._pipe[0], 1):
            # A debugger with a handler of its own keeps Ctrl-C.
            if received[0] == signal.SIGINT and signal.getsignal(signal.SIGINT) == self._interrupt:
                signal.alarm(INTERRUPT_GRACE_S + 3)  # the kernel's word, should this thread starve
                time.sleep(INTERRUPT_GRACE_S)
                self._before_exit()
                for pid in descendants(os.getpid()):
                    _kill(pid)
                os._exit(128 + signal.SIGINT)
        os.close(self._pipe[0])


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


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
