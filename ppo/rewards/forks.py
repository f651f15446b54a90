"""Processes that a reward function forks inside its worker, with os.fork or multiprocessing.

Owns what such a child begins with, and where it ends. Must not know how samples are scored.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""meant for the trainer when they reach a worker"""


def ignore_signals() -> None:
    """Let the worker live through SIGNALS; what it executes has the defaults, unlike SIG_IGN."""
    for number in SIGNALS:
        signal.signal(number, _ignore)


def begin_children_afresh(channel: Connection) -> None:
    """From now on a forked child has Python's own signal handlers, and no worker's socket.

    Else terminate() would not end it, and what it sends would pass for the worker's answers. A
    handler that the function has set by itself is inherited, as always.
    """
    masks = threading.local()

    def before() -> None:  # a signal that comes early waits for the child's handlers
        masks.old = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def restore() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.old)

    def in_child() -> None:
        for number in SIGNALS:
            if signal.getsignal(number) is _ignore:
                is_interrupt = number == signal.SIGINT
                default = signal.default_int_handler if is_interrupt else signal.SIG_DFL
                signal.signal(number, default)
        channel.close()
        restore()

    os.register_at_fork(before=before, after_in_parent=restore, after_in_child=in_child)


@contextmanager
def ended_in_children() -> Iterator[None]:
    """A process that is forked inside the block and comes out of it ends there, as programs do.

    A function may fork and return in both processes: only the worker goes on.
    """
    worker = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != worker:
            _end(sys.exception())


def _end(error: BaseException | None) -> None:
    code = error.code if isinstance(error, SystemExit) else None
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
        code = 1
    elif code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)  # not the worker's exit functions: its files are still in use


def _ignore(number: int, frame: FrameType | None) -> None:
    pass
