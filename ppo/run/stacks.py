"""The stacks of a process that does not answer, in its log, before it is ended by a sibling.

Owns the signal. Must not know why the process is ended.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

STACKS_SIGNAL = signal.SIGUSR2
"""has a process write the stacks of its threads into its log, also one that holds Python's lock:
registered with faulthandler"""
STACKS_S = 3.0
"""waited for it at most: a process that the kernel holds never takes a signal"""
WRITE_S = 0.3


def kill_stopped(pids: list[int]) -> None:
    """Kill siblings that do not answer, after they have had the time to write their stacks."""
    siblings = [pid for pid in pids if pid != os.getpid() and _parent(pid) == os.getppid()]
    for number in (STACKS_SIGNAL, signal.SIGCONT, signal.SIGKILL):
        if number == signal.SIGKILL and siblings:
            _await_stacks(siblings)
        for pid in siblings:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def _await_stacks(pids: list[int]) -> None:
    """Wait until the processes have taken STACKS_SIGNAL, and until they have written."""
    until = time.monotonic() + STACKS_S
    while time.monotonic() < until and any(map(_awaits_stacks, pids)):
        time.sleep(0.05)
    time.sleep(WRITE_S)


def _awaits_stacks(pid: int) -> bool:
    """Whether STACKS_SIGNAL has been sent to the process, and not been taken."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    pending = (line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd:"))
    return any(int(mask, 16) >> (STACKS_SIGNAL - 1) & 1 for mask in pending)


def _parent(pid: int) -> int | None:
    """Process id of the parent of a process of this machine; None where there is no such."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
