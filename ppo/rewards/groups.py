"""Process groups: a worker and all that its function has started end together.

Owns what is in a group and how it ends; Linux's /proc and pidfd, where there are any. Must not know
what a worker does.
"""

import os
import select
import signal
from contextlib import suppress
from pathlib import Path

KILLS = 3
"""times that a group is looked through: who forks meanwhile is found by the next"""


def end_group_with(leader: int) -> None:
    """Have the group of this process end when `leader`, which leads it, has ended.

    A worker dies with the trainer (PR_SET_PDEATHSIG), its function's own processes do not know of
    it. Another process waits for it: no child of the worker, whose function may wait for all of its
    children, and without the worker's descriptors. Call it before there are threads.
    """
    try:
        watched = os.pidfd_open(leader)
    except (OSError, AttributeError):  # no Linux, or one before 5.3
        return
    child = os.fork()
    if child:
        os.close(watched)
        os.waitpid(child, 0)
        return
    try:
        if os.fork() == 0:
            _kill_others_after(os.dup2(watched, 0), group=leader)
    finally:
        os._exit(0)


def _kill_others_after(process: int, *, group: int) -> None:
    """End a group when the process of a pidfd has ended."""
    os.closerange(process + 1, 1 << 16)  # far above what a worker opens
    select.select([process], [], [])
    for _ in range(KILLS):
        for pid in _members(group):
            if pid != os.getpid() and not _is_resource_tracker(pid):
                _send_signal(pid, signal.SIGKILL)


def kill_group(group: int) -> None:
    """End all processes of a group, but for multiprocessing's resource trackers.

    A tracker unlinks the shared memory and the semaphores that the others leave behind, and ends
    by itself when the last of them has gone.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGSTOP)  # from here on nobody forks
        trackers = [pid for pid in _members(group) if _is_resource_tracker(pid)]
        if not trackers:
            os.killpg(group, signal.SIGKILL)
            return
        for pid in _members(group):
            if pid not in trackers:
                _send_signal(pid, signal.SIGKILL)
        for pid in trackers:
            _send_signal(pid, signal.SIGCONT)


def _members(group: int) -> list[int]:
    """Process ids of a group; empty where there is no /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[2]) == group:
                found.append(int(stat.parent.name))
    return found


def _is_resource_tracker(pid: int) -> bool:
    with suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _send_signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
