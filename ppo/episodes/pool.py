"""The processes that run a replica's episodes, and the turns that these ask for.

Owns the processes: many episodes in each, time limits, what becomes of the episodes of one that
dies. In a thread of its own, so that this goes on while the engine works. Must not know the engine.

An episode whose process dies or hangs has failed where it is known to be its fault: it had the
process to itself, or the event loop for too long. Else it is begun again in another process, and is
told the turns that it had: those that waited for the engine at once, those that were running one by
one, alone. Code that answers alike goes on where it was; the tokens are the same in any case.
"""

import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from ppo.episodes.chat import Chat
from ppo.episodes.contract import (
    ChatFormat,
    EpisodeError,
    EpisodeProgram,
    EpisodeResult,
    EpisodeSpec,
    Limits,
    TurnReply,
    TurnRequest,
)
from ppo.episodes.program import check_program
from ppo.episodes.transcript import BadEvent, Transcript, replay
from ppo.rewards.process import WorkerProcess

START_TIMEOUT_S = 120.0
"""time for a process to start and import the user's file"""
GRACE_S = 5.0
"""a process ends late episodes itself; after this it is killed"""
SILENT_S = 30.0
"""a process with episodes gives signs of life; after this it is killed"""
SEND_TIMEOUT_S = 10
"""a process that reads nothing for so long is dead"""
LOOK_S = 0.5
MOST_MESSAGES = 64
"""read from one process before another's turn"""
DEAD = float("-inf")
MOST_BEGINNINGS = 4
"""times that an episode is begun again because of others"""


@dataclass(eq=False)
class _Running:
    """An episode that has not ended."""

    spec: EpisodeSpec
    transcript: Transcript
    earlier: Transcript | None = None
    """what it was in a process that died: it is told the same turns"""
    flying: dict[int, TurnRequest] = field(default_factory=dict)
    """what the engine owes, by segment"""
    held: dict[int, TurnRequest] = field(default_factory=dict)
    """asked for after another beginning, while the engine is still at another request"""
    beginnings: int = 0
    alone: bool = False
    deadline: float = float("inf")
    tape: Iterator[list[TurnRequest]] | None = None


@dataclass(eq=False)
class _Slot:
    """A place for a process and the episodes in it."""

    worker: WorkerProcess
    heard: float
    is_ready: bool = False
    is_stuck: bool = False
    """threads hang in it: it gets no new episodes and is replaced when it has none"""
    episodes: dict[int, _Running] = field(default_factory=dict)

    @property
    def is_lent(self) -> bool:
        """Whether one episode has it to itself."""
        return any(running.alone for running in self.episodes.values())


class EpisodePool:
    """Runs episodes in `num_workers` processes that import no torch.

    Use as a context manager: entering starts the processes and waits for them. Its methods are for
    one thread; none of them waits for an episode, but for `poll` as long as it is told to.

    Args:
        chat: see `chat_format`.
        num_workers: 0 is enough where every spec has a tape.
        log_path: file for what the user's code prints; None = this process's stderr.

    Raises:
        EpisodeError: on entering, when the program cannot be had (file, name, import, kind).
    """

    def __init__(
        self,
        program: EpisodeProgram,
        chat: ChatFormat,
        limits: Limits,
        *,
        num_workers: int,
        log_path: Path | None = None,
    ) -> None:
        self._setup = (program, chat, limits)
        self._program, self._limits = program, limits
        self._chat = Chat(chat)
        self._num_workers = num_workers
        self._log_path = log_path
        self._changed = threading.Condition()
        # what goes between the threads, under `_changed`
        self._inbox: deque[Sequence[EpisodeSpec] | Sequence[TurnReply] | threading.Event] = deque()
        self._requests: list[TurnRequest] = []
        self._results: list[EpisodeResult] = []
        self._unfinished: set[int] = set()
        self._error: str | None = None
        self._num_ready = 0
        self._held = 0
        self._closing = False
        # the pool's thread alone
        self._slots: list[_Slot] = []
        self._running: dict[int, _Running] = {}
        self._queue: deque[_Running] = deque()
        self._wake_in, self._wake_out = Pipe(duplex=False)
        self._thread = threading.Thread(target=self._serve, name="episodes", daemon=True)

    def __enter__(self) -> Self:
        if self._num_workers:
            check_program(self._program)
        with ExitStack() as on_error:
            self._thread.start()
            on_error.callback(self.close)
            with self._changed:
                self._changed.wait_for(lambda: self._error or self._num_ready >= self._num_workers)
            self._raise()
            on_error.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the processes; episodes that have not ended are dropped. May be called twice."""
        self._closing = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def pids(self) -> list[int]:
        """Process ids of this moment."""
        return [slot.worker.pid for slot in self._slots]

    @property
    def unfinished(self) -> int:
        """Episodes that have begun and whose results `poll` has not given."""
        return len(self._unfinished)

    @property
    def held(self) -> int:
        """Unfinished episodes that ask for nothing until another has ended, as they wait for a
        process: after one has died, or hangs. Nobody must wait for their turns."""
        return self._held

    def begin(self, specs: Sequence[EpisodeSpec]) -> None:
        """Begin episodes; their numbers must not be those of unfinished ones."""
        numbers = {spec.number for spec in specs}
        assert len(numbers) == len(specs) and not numbers & self._unfinished, numbers
        self._unfinished |= numbers
        self._put(list(specs))

    def answer(self, replies: Sequence[TurnReply]) -> None:
        """Hand over what the engine has sampled, in any order."""
        self._put(list(replies))

    def poll(self, timeout_s: float = 0.0) -> tuple[list[TurnRequest], list[EpisodeResult]]:
        """Turns that have been asked for since the last call, and episodes that have ended.

        Waits for the first for timeout_s at most. Raises EpisodeError when the pool is broken.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._requests or self._results or self._error, timeout_s
            )
            self._raise()
            requests, self._requests = self._requests, []
            results, self._results = self._results, []
        self._unfinished -= {result.number for result in results}
        return requests, results

    def abort(self) -> None:
        """Drop all episodes; the processes that had some are replaced."""
        dropped = threading.Event()
        with self._changed:
            self._inbox.clear()
        self._put(dropped)
        while not dropped.wait(0.1) and self._error is None:
            pass
        with self._changed:
            self._requests, self._results = [], []
        self._unfinished.clear()

    def _put(self, what: Sequence[EpisodeSpec] | Sequence[TurnReply] | threading.Event) -> None:
        with self._changed:
            self._inbox.append(what)
        self._wake()

    def _wake(self) -> None:
        self._wake_out.send_bytes(b"")

    def _raise(self) -> None:
        if self._error is not None:
            raise EpisodeError(self._error)

    # From here on: the pool's thread.

    def _serve(self) -> None:
        with ExitStack() as owned:
            owned.push(self._end)
            log = None
            if self._log_path is not None:
                log = owned.enter_context(self._log_path.open("ab"))
            self._slots += [self._start(log) for _ in range(self._num_workers)]
            while not self._closing and self._error is None:
                self._take_inbox()
                self._hand_out()
                self._receive()
                self._replace(log)

    def _end(self, kind: object, error: BaseException | None, trace: object) -> None:
        for slot in self._slots:
            slot.worker.kill()
        with self._changed:
            why = "the episode pool is closed" if error is None else f"the pool broke: {error!r}"
            self._error = self._error or why
            self._changed.notify_all()

    def _start(self, log: IO[bytes] | None) -> _Slot:
        worker = WorkerProcess("ppo.episodes.worker", self._setup, log=log)
        end = socket.socket(fileno=os.dup(worker.channel.fileno()))
        limit = struct.pack("ll", SEND_TIMEOUT_S, 0)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        end.close()
        return _Slot(worker, time.monotonic())

    def _take_inbox(self) -> None:
        while True:
            with self._changed:
                if not self._inbox:
                    return
                what = self._inbox.popleft()
            if isinstance(what, threading.Event):
                self._drop_all()
                what.set()
                continue
            for each in what:
                if isinstance(each, EpisodeSpec):
                    self._begin(each)
                else:
                    self._answer(each)

    def _begin(self, spec: EpisodeSpec) -> None:
        running = _Running(spec, Transcript(spec, self._limits))
        self._running[spec.number] = running
        if spec.tape is None:
            self._queue.append(running)
        else:
            running.tape = replay(running.transcript, spec.tape)
            self._go_on(running)

    def _go_on(self, running: _Running) -> None:
        """Feed a tape until it waits."""
        assert running.tape is not None
        try:
            for request in next(running.tape, []):
                self._ask(running, request)
        except BadEvent as error:
            self._finish(running, failed="error", reason=f"the tape does not fit: {error}")
            return
        if running.transcript.ending is not None:
            self._finish(running)

    def _ask(self, running: _Running, request: TurnRequest) -> None:
        """A turn is asked for: of an earlier beginning, on its way already, or of the engine."""
        known = running.earlier.recall(request) if running.earlier is not None else None
        if known is not None:
            self._deliver(running, known)
        elif request.segment not in running.flying:
            running.flying[request.segment] = request
            with self._changed:
                self._requests.append(request)
                self._changed.notify_all()
        elif running.flying[request.segment] != request:
            running.held[request.segment] = request

    def _answer(self, reply: TurnReply) -> None:
        running = self._running.get(reply.episode)
        asked = None if running is None else running.flying.pop(reply.segment, None)
        if running is None or asked is None:  # it has failed meanwhile
            return
        if reply.segment in running.held:
            self._ask(running, running.held.pop(reply.segment))
        elif running.transcript.asks(asked):
            self._deliver(running, reply)
        elif running.earlier is not None and running.earlier.asks(asked):
            running.earlier.answer(reply)  # it will ask again

    def _deliver(self, running: _Running, reply: TurnReply) -> None:
        running.transcript.answer(reply)
        if running.tape is not None:
            self._go_on(running)
            return
        number = running.spec.number
        slot = next((slot for slot in self._slots if number in slot.episodes), None)
        if slot is not None:
            said = ("reply", number, reply.segment, reply.ids.tolist(), reply.finish)
            self._send(slot, said)

    def _send(self, slot: _Slot, message: tuple[Any, ...]) -> None:
        slot.worker.send(message)
        if slot.worker.has_unread:
            slot.heard = DEAD

    def _hand_out(self) -> None:
        """Give episodes that wait to the processes with the fewest."""
        left: deque[_Running] = deque()
        while self._queue:
            running = self._queue.popleft()
            ready = [s for s in self._slots if s.is_ready and not s.is_stuck and not s.is_lent]
            slot = min(ready, key=lambda slot: len(slot.episodes), default=None)
            if slot is None or (running.alone and slot.episodes):
                left.append(running)
                continue
            running.deadline = time.monotonic() + self._limits.timeout_s + GRACE_S
            slot.heard = time.monotonic()
            slot.episodes[running.spec.number] = running
            self._send(slot, ("begin", running.spec))
        self._queue, self._held = left, len(left)

    def _receive(self) -> None:
        """Wait for messages for a moment, and take all that have come."""
        slots: dict[Connection, _Slot] = {slot.worker.channel: slot for slot in self._slots}  # type: ignore[misc]
        for channel in wait([*slots, self._wake_in], LOOK_S):
            if channel is self._wake_in:
                self._wake_in.recv_bytes()
                continue
            slot = slots[channel]  # type: ignore[index]
            for _ in range(MOST_MESSAGES):
                self._receive_one(slot)
                if slot.heard == DEAD or not slot.worker.channel.poll(0):
                    break

    def _receive_one(self, slot: _Slot) -> None:
        message = slot.worker.receive()
        if message is None:
            slot.heard = DEAD  # replaced below
            return
        slot.heard = time.monotonic()
        try:
            self._read(slot, message)
        except (BadEvent, KeyError, TypeError, ValueError):  # it is not the worker that speaks
            slot.heard = DEAD

    def _read(self, slot: _Slot, message: dict[str, Any]) -> None:
        if "ready" in message:
            slot.is_ready = True
            with self._changed:
                self._num_ready += 1
                self._changed.notify_all()
        elif "broken" in message:
            with self._changed:
                self._error = f"rollout.episode: {message['broken']}"
                self._changed.notify_all()
        elif "alive" in message:
            slot.is_stuck = message["stuck"] > 0
            if message["blocked_s"] > self._limits.tool_timeout_s + GRACE_S:
                self._lose(slot, "its process was blocked", culprit=message["alive"])
                slot.heard = DEAD
        else:
            running = slot.episodes[message.pop("e")]
            request = running.transcript.read(message)
            if running.transcript.ending is not None:
                del slot.episodes[running.spec.number]
                self._finish(running)
            elif request is not None:
                self._ask(running, request)

    def _finish(self, running: _Running, *, failed: str | None = None, reason: str = "") -> None:
        result = running.transcript.result(self._chat, failed=failed, reason=reason)
        del self._running[running.spec.number]
        with self._changed:
            self._results.append(result)
            self._changed.notify_all()

    def _replace(self, log: IO[bytes] | None) -> None:
        """Put a new process in the place of each that is dead, late, silent or worn out."""
        now = time.monotonic()
        for place, slot in enumerate(self._slots):
            if slot.is_stuck and not slot.episodes:
                slot.worker.kill()
                self._slots[place] = self._start(log)
                continue
            is_dead = slot.heard == DEAD
            late = [n for n, running in slot.episodes.items() if running.deadline < now]
            silent_s = START_TIMEOUT_S if not slot.is_ready else SILENT_S
            waits = bool(slot.episodes) or not slot.is_ready
            if not is_dead and not late and not (waits and slot.heard + silent_s < now):
                continue
            how = slot.worker.kill(wait_s=1.0 if is_dead else 0.0)
            if not slot.is_ready:
                with self._changed:
                    self._error = f"a process of rollout.episode ended ({how}) while it started"
                return
            reason = f"its process ended ({how})" if is_dead else "its process hung"
            for number in late:
                late_one = slot.episodes.pop(number)
                text = f"no end after {self._limits.timeout_s:g} s"
                self._finish(late_one, failed="timeout", reason=text)
            self._lose(slot, reason)
            self._slots[place] = self._start(log)

    def _lose(self, slot: _Slot, reason: str, *, culprit: int | None = None) -> None:
        """The episodes of a process that is gone, or will be: one has failed, or will when it is
        tried alone; the others begin again."""
        episodes = list(slot.episodes.values())
        suspects = [r for r in episodes if not r.transcript.waits] or episodes
        if culprit in slot.episodes:
            suspects = [slot.episodes[culprit]]
            reason = f"its code had the event loop for over {self._limits.tool_timeout_s:g} s"
        slot.episodes.clear()
        for running in episodes:
            is_known = running in suspects and (len(suspects) == 1 or running.alone)
            if is_known or running.beginnings == MOST_BEGINNINGS:
                self._finish(running, failed="error", reason=reason)
            else:
                self._begin_again(running, alone=running in suspects)

    def _begin_again(self, running: _Running, *, alone: bool) -> None:
        known = [t for t in (running.earlier, running.transcript) if t is not None]
        running.earlier = max(known, key=lambda transcript: transcript.counts["turns"])
        running.transcript = Transcript(running.spec, self._limits)
        running.held.clear()
        running.beginnings += 1
        running.alone = alone
        (self._queue.appendleft if alone else self._queue.append)(running)

    def _drop_all(self) -> None:
        for slot in self._slots:
            if slot.episodes:
                slot.episodes.clear()
                slot.is_stuck = True  # replaced: its episodes go on in it
        self._running.clear()
        self._queue.clear()
