"""A process that runs the user's code as its parent sees it: start, send, receive, kill.

Owns the process and its socket. Must not know queues or results.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import IO, Any

from ppo.rewards.groups import kill_group

ROOT = Path(__file__).resolve().parents[2]
"""folder of the package ppo: the worker may be started from anywhere"""
LARGEST_MESSAGE = 64 << 20
"""bytes; a function that writes to the socket could announce any number"""
START = (
    "import importlib, sys; sys.path.insert(0, sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).main(int(sys.argv[3]), int(sys.argv[4]))"
)


class WorkerProcess:
    """A worker: a new interpreter in a session of its own, which never imports the trainer.

    It dies with the thread that makes it, at the latest with the process (PR_SET_PDEATHSIG). A
    session of its own, so that Ctrl-C and torchrun's signals reach the trainer alone and that the
    worker can be killed with all that it started.

    Args:
        module: whose `main(fd, parent)` it runs.
        setup: what it reads first.
        log: where its prints go; None = this process's stderr.
    """

    def __init__(self, module: str, setup: Any, *, log: IO[bytes] | None) -> None:
        self.has_unread = False
        """it died before it read what was sent to it last"""
        self.channel, theirs = Pipe()
        output = sys.__stderr__ if log is None else log
        command = [sys.executable, "-P", "-c", START, str(ROOT), module, str(theirs.fileno())]
        self.process = subprocess.Popen(
            [*command, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        _on_all_cores(self.pid)
        self.send(setup)

    @property
    def pid(self) -> int:
        """Process id, also the id of its process group."""
        return self.process.pid

    def send(self, message: Any) -> None:
        """Hand over what it will unpickle; to a scoring worker only once it has answered all."""
        try:
            self.channel.send_bytes(pickle.dumps(message))
        except OSError:  # a dead worker shows up when it is read from
            self.has_unread = True

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the worker has died, or no longer speaks as one."""
        try:
            message = json.loads(self.channel.recv_bytes(LARGEST_MESSAGE))
        except (EOFError, OSError, ValueError, RecursionError) as error:
            # a Unix socket that closes over unread data resets the other end
            self.has_unread = self.has_unread or isinstance(error, ConnectionResetError)
            return None
        return message if isinstance(message, dict) else None

    def kill(self, *, wait_s: float = 0.0) -> str:
        """End it and all that it started; says how it ended, for messages.

        Args:
            wait_s: for a worker whose socket has closed: it may be about to end by itself, and how
                is worth knowing.
        """
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(wait_s)
        kill_group(self.pid)
        code = self.process.wait()
        self.channel.close()
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _on_all_cores(pid: int) -> None:
    """A rank may be bound to some cores (ppo/run/machine.py); what starts it is not."""
    with suppress(OSError, AttributeError):  # it has ended already; no Linux
        os.sched_setaffinity(pid, os.sched_getaffinity(os.getppid()))
