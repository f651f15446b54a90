"""What a process that runs the user's code does to itself before it does: limits, and its end.

Owns memory, signals, descriptors, and death with the parent. Must not know what it will run.
"""

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection

from ppo.rewards.forks import begin_children_afresh, ignore_signals
from ppo.rewards.groups import end_group_with

MEMORY_LIMIT_GIB = 8
"""private memory of a process; code that needs more gets a MemoryError"""
PARENT_WATCH_S = 1.0


def confine(fd: int, parent: int) -> Connection:
    """Limit this process and tie it to its parent; the socket `fd` to it."""
    end_group_with(os.getpid())
    _die_with(parent)
    ignore_signals()
    _limit_resources()
    os.set_inheritable(fd, False)  # by what the user's code executes
    channel = Connection(fd)
    begin_children_afresh(channel)
    return channel


def _die_with(parent: int) -> None:
    """End when the parent ends, however it does."""
    with suppress(OSError, AttributeError):  # Linux
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _limit_resources() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = MEMORY_LIMIT_GIB << 30
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or hard > limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, a worker goes before the trainer
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
