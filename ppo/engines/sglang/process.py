"""The leader's end of an engine host: starts the process, asks it things, notices when it is gone.

Owns the process, the pipe and the log file. Must not know weights, requests or the other ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Generator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ppo.engines.sglang import host as sglang_host
from ppo.engines.sglang.executor import EngineError
from sharding.progress import PROGRESS

POLL_S = 0.5
PIPE_TIMEOUT_S = 60  # a host that neither reads nor writes for so long is hung
END_TIMEOUT_S = 8.0
STACKS_TIMEOUT_S = 10.0
TAIL_LINES = 40
TAIL_COLUMNS = 300  # SGLang prints all its arguments in one line


class HostProcess:
    """One engine host. Calls are numbered; replies to abandoned calls are passed over."""

    def __init__(self, settings: dict[str, Any], *, rank: int, log: Path) -> None:
        """Start the host without waiting for it; call 0 is the start of the engine.

        ``settings`` are `engine` (arguments of sglang.Engine), `environment` and `first_on_path`.
        """
        self.rank, self.log = rank, log
        self._next_call, self._up = 0, False
        self._shared_files: list[str] = []
        ours, theirs = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", PIPE_TIMEOUT_S, 0))
        with theirs, log.open("ab") as output:
            # A session of its own: signals for the trainer's process group are not for the engine.
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    sglang_host.__file__,
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        with contextlib.suppress(
            OSError
        ):  # a rank may be bound to its GPU's cores, an engine has other GPUs
            os.sched_setaffinity(self.process.pid, os.sched_getaffinity(os.getppid()))
        self._connection = Connection(ours.detach())
        self.submit("start", **settings)

    @property
    def ended(self) -> bool:
        """Whether the engine has been found dead, or been closed."""
        return self._connection.closed

    def submit(self, verb: str, **arguments: Any) -> int:
        """Send a call and return its number. Raises EngineError when the host does not read."""
        call, self._next_call = self._next_call, self._next_call + 1
        try:
            self._connection.send((call, verb, arguments))
        except OSError as error:
            raise self._error(f"cannot be asked to {verb}", error) from error
        return call

    def listen(self, call: int, verb: str, seconds: float = POLL_S) -> Any:
        """What a call that runs has to tell within so long, or None.

        Raises EngineError when the host has ended.
        """
        reply = self._poll(verb, seconds)
        return reply[2] if reply is not None and reply[1] == call else None

    def hung(self, verb: str, seconds: float) -> EngineError:
        """The error of a host that has reported no progress for so long; it is ended."""
        self._log_stacks()
        return self._error(f"made no progress for {seconds:g} s in {verb}")

    def collect(self, call: int, verb: str, *, timeout_s: float) -> Generator[None, None, Any]:
        """Wait for the reply and return it; yields about every half second.

        Raises EngineError when the host ends, or reports no progress for ``timeout_s`` seconds.
        """
        marker, changed = None, time.monotonic()
        while True:
            reply = self._poll(verb)
            if reply is not None and reply[1] == call:
                kind, _, value = reply
                if kind == "done":
                    if not self._up:
                        self._up, self._shared_files = True, value["shared_files"]
                    return value
                if value != marker:
                    marker, changed = value, time.monotonic()
                    PROGRESS.tick()
            if not self._up:
                PROGRESS.tick()  # its start has a limit of its own, and reports nothing
            if time.monotonic() - changed > timeout_s:
                raise self.hung(verb, timeout_s)
            yield

    def ask(self, verb: str, *, timeout_s: float, **arguments: Any) -> Any:
        """Send a call and wait for its reply without giving control back."""
        return self.wait(self.submit(verb, **arguments), verb, timeout_s=timeout_s)

    def wait(self, call: int, verb: str, *, timeout_s: float) -> Any:
        """The same as `collect`, without giving control back."""
        waiting = self.collect(call, verb, timeout_s=timeout_s)
        while True:
            try:
                next(waiting)
            except StopIteration as reply:
                return reply.value

    def _poll(self, verb: str, seconds: float = POLL_S) -> tuple[str, int, Any] | None:
        try:
            return self._connection.recv() if self._connection.poll(seconds) else None
        except (EOFError, OSError) as error:
            raise self._error(f"ended in {verb}", error) from error

    def _error(self, what: str, cause: BaseException | None = None) -> EngineError:
        """The error to raise; the engine is ended first, so that its log is complete."""
        if isinstance(cause, (EOFError, ConnectionError)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                what += f" (exit code {self.process.wait(END_TIMEOUT_S)})"
        self.kill()
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        tail = "\n".join(line[:TAIL_COLUMNS] for line in lines)
        return EngineError(
            f"rank {self.rank}: the SGLang engine {what}; the end of {self.log}:\n{tail}"
        )

    def _log_stacks(self) -> None:
        """Stacks of the engine's processes at the end of its log, where py-spy is installed (it
        comes with SGLang) and the kernel lets it."""
        program = Path(sys.executable).with_name("py-spy")
        command = [str(program), "dump", "--nonblocking", "--subprocesses"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired), self.log.open("ab") as log:
            subprocess.run(
                [*command, "--pid", str(self.process.pid)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=STACKS_TIMEOUT_S,
            )

    def abort(self, call: int) -> None:
        """Have the engine drop what it generates; the call is still answered."""
        self.submit("abort", call=call)

    def close(self) -> None:
        """End the engine, in good order if it is up and answers. May be called twice."""
        if self._up:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._connection.send((self._next_call, "close", {}))
                self.process.wait(END_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End the host and everything that it has started, now."""
        if not self._connection.closed:
            with contextlib.suppress(ProcessLookupError):  # its group is empty already
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self._connection.close()
            for file in self._shared_files:
                Path(file).unlink(missing_ok=True)
