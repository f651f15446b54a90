"""The processes of a pool: which has which episodes, and what becomes of those of one that dies.

Owns the slots, in the pool's thread. Must not know the engine's side.

An episode whose process dies or hangs has failed where it is known to be its fault: it had the
process to itself, or the event loop for too long. Else it is begun again in another process, and is
told the turns that it had: those that waited for the engine at once, those that were running one by
one, alone. Code that answers alike goes on where it was; the tokens are the same in any case.
"""

import os
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import IO, Any, Protocol

from ppo.episodes.contract import Limits, TurnRequest
from ppo.episodes.running import Running
from ppo.episodes.transcript import BadEvent
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
MOST_BEGINNINGS = 4
"""times that an episode is begun again because of others"""
MOST_MESSAGES = 64
"""read from one process before another's turn"""
DEAD = float("-inf")


class Listener(Protocol):
    """Hears what the processes say."""

    def ready(self) -> None:
        """One has started, and has the user's file."""
        ...

    def broken(self, problem: str) -> None:
        """The user's file cannot be had: nothing can run."""
        ...

    def asked(self, running: Running, request: TurnRequest) -> None:
        """An episode's code wants a turn."""
        ...

    def ended(self, running: Running, failed: str | None = None, reason: str = "") -> None:
        """An episode has ended, by itself or not."""
        ...


@dataclass(eq=False)
class _Slot:
    """A place for a process and the episodes in it."""

    worker: WorkerProcess
    heard: float
    is_ready: bool = False
    is_stuck: bool = False
    """threads hang in it, by its last sign of life"""
    has_dropped: bool = False
    """episodes go on in it that were dropped"""
    episodes: dict[int, Running] = field(default_factory=dict)

    @property
    def is_worn(self) -> bool:
        """Whether it gets no new episodes, and is replaced when it has none."""
        return self.is_stuck or self.has_dropped

    @property
    def takes_more(self) -> bool:
        """Whether it may get an episode; not when one has it to itself."""
        lent = any(running.alone for running in self.episodes.values())
        return self.is_ready and not self.is_worn and not lent


class Processes:
    """Processes with episodes in them, and the episodes that wait for one.

    Args:
        setup: what each reads first.
        log: where the user's code prints; None = this process's stderr.
    """

    def __init__(
        self, number: int, setup: Any, limits: Limits, listener: Listener, log: IO[bytes] | None
    ) -> None:
        self._setup, self._limits, self._listener, self._log = setup, limits, listener, log
        self._queue: deque[Running] = deque()
        self._slots = [self._start() for _ in range(number)]

    @property
    def pids(self) -> list[int]:
        """Process ids of this moment."""
        return [slot.worker.pid for slot in self._slots]

    @property
    def held(self) -> int:
        """Episodes that wait for a process, once `hand_out` has given what it can."""
        return len(self._queue)

    def add(self, running: Running) -> None:
        """An episode that `hand_out` will give to one."""
        self._queue.append(running)

    def tell(self, number: int, *message: Any) -> None:
        """Say something to the process that has an episode, if one has it now."""
        slot = next((slot for slot in self._slots if number in slot.episodes), None)
        if slot is not None:
            self._send(slot, message)

    def drop_all(self) -> None:
        """Forget all episodes; processes that had some are replaced, as these go on in them."""
        for slot in self._slots:
            slot.has_dropped = slot.has_dropped or bool(slot.episodes)
            slot.episodes.clear()
        self._queue.clear()

    def kill(self) -> None:
        """End them all."""
        for slot in self._slots:
            slot.worker.kill()

    def hand_out(self) -> None:
        """Give episodes that wait to the processes with the fewest."""
        left: deque[Running] = deque()
        while self._queue:
            running = self._queue.popleft()
            ready = [slot for slot in self._slots if slot.takes_more]
            slot = min(ready, key=lambda slot: len(slot.episodes), default=None)
            if slot is None or (running.alone and slot.episodes):
                left.append(running)
                continue
            slot.heard = time.monotonic()
            running.deadline = slot.heard + self._limits.timeout_s + GRACE_S
            slot.episodes[running.spec.number] = running
            self._send(slot, ("begin", running.spec))
        self._queue = left

    def receive(self, wake: Connection) -> None:
        """Wait for messages, or for `wake`, for a moment, and take all that have come."""
        slots: dict[object, _Slot] = {slot.worker.channel: slot for slot in self._slots}
        for channel in wait([*(slot.worker.channel for slot in self._slots), wake], LOOK_S):
            if channel is wake:
                wake.recv_bytes()
                continue
            slot = slots[channel]
            for _ in range(MOST_MESSAGES):
                self._receive_one(slot)
                if slot.heard == DEAD or not slot.worker.channel.poll(0):
                    break

    def replace(self) -> None:
        """Put a new process in the place of each that is dead, late, silent or worn out."""
        now = time.monotonic()
        for place, slot in enumerate(self._slots):
            if slot.is_worn and not slot.episodes:
                slot.worker.kill()
                self._slots[place] = self._start()
                continue
            is_dead = slot.heard == DEAD
            late = [n for n, running in slot.episodes.items() if running.deadline < now]
            silent_s = SILENT_S if slot.is_ready else START_TIMEOUT_S
            speaks = slot.is_ready and not slot.episodes
            if not is_dead and not late and (speaks or now < slot.heard + silent_s):
                continue
            how = slot.worker.kill(wait_s=1.0 if is_dead else 0.0)
            if not slot.is_ready:
                self._listener.broken(f"a process ended ({how}) while it started")
                return
            for number in late:
                text = f"no end after {self._limits.timeout_s:g} s"
                self._listener.ended(slot.episodes.pop(number), "timeout", text)
            self._lose(slot, f"its process ended ({how})" if is_dead else "its process hung")
            self._slots[place] = self._start()

    def _start(self) -> _Slot:
        worker = WorkerProcess("ppo.episodes.worker", self._setup, log=self._log)
        with socket.socket(fileno=os.dup(worker.channel.fileno())) as end:
            limit = struct.pack("ll", SEND_TIMEOUT_S, 0)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        return _Slot(worker, time.monotonic())

    def _send(self, slot: _Slot, message: Sequence[Any]) -> None:
        slot.worker.send(tuple(message))
        if slot.worker.has_unread:
            slot.heard = DEAD

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
            self._listener.ready()
        elif "broken" in message:
            self._listener.broken(message["broken"])
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
                self._listener.ended(running)
            elif request is not None:
                self._listener.asked(running, request)

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
                self._listener.ended(running, "error", reason)
                continue
            running.begin_again(alone=running in suspects)
            (self._queue.appendleft if running.alone else self._queue.append)(running)
