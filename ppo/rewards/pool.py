"""The scoring processes of a node: samples in, scores out, whatever the function does.

Owns the queue, the time limits and the replacement of workers, in one thread, so that limits hold
while the trainer is busy elsewhere. Must not know batches, ranks or metrics.

    with RewardPool(config.reward) as pool:
        warnings = pool.probe(requests)
        job = pool.submit(requests)
        while not job.poll(0.5): ...
        job.results
"""

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from ppo.rewards.contract import RewardError, RewardRequest, RewardResult, RewardSettings
from ppo.rewards.function import check_function, functions_of
from ppo.rewards.job import PoolState, RewardJob
from ppo.rewards.process import WorkerProcess
from ppo.rewards.worker import Task, late

ASYNC_GROUP = 16
"""samples that one worker awaits together when the function is async"""
ASYNC_GRACE_S = 5.0
"""an async worker ends samples over the limit itself; after this it is killed"""
START_TIMEOUT_S = 120.0
"""time for a worker to start and import the function's file"""
IDLE_WAIT_S = 60.0


@dataclass
class _Item:
    """A sample in the queue or with a worker."""

    job: RewardJob
    index: int
    alone: bool = False  # its group died: score it by itself, to find which one it was


@dataclass
class _Slot:
    """A place for a worker and what it is doing."""

    worker: WorkerProcess
    deadline: float
    is_ready: bool = False
    is_async: bool = False
    items: dict[int, _Item] = field(default_factory=dict)


class RewardPool:
    """Scores samples in `reward.num_workers` processes that import no torch.

    A sample whose function raises, returns NaN or infinity, runs over reward.timeout_s or ends its
    process costs that sample alone. Use as a context manager: entering starts the workers.

    Args:
        log_path: file for what the function prints; None = this process's stderr.

    Raises:
        RewardError: on entering, when the function cannot be had (file, name, import, signature).
    """

    def __init__(self, reward: RewardSettings, *, log_path: Path | None = None) -> None:
        self.columns: frozenset[str] = frozenset()
        """columns of the data that the functions cannot do without; known once entered"""
        self._functions = functions_of(reward.function)
        self._num_workers = reward.num_workers
        self._timeout_s = reward.timeout_s
        self._log_path = log_path
        self._state = PoolState()
        self._queue: deque[_Item] = deque()
        self._slots: list[_Slot] = []
        self._number = 0
        self._closing = False
        self._wake_in, self._wake_out = Pipe(duplex=False)
        self._thread = threading.Thread(target=self._serve, name="reward-pool", daemon=True)

    def __enter__(self) -> Self:
        for function in self._functions:
            check_function(function)
        with ExitStack() as on_error:
            self._thread.start()
            on_error.callback(self.close)
            with self._state.changed:
                self._state.changed.wait_for(lambda: self._state.error or self._all_ready())
            if self._state.error is not None:
                raise RewardError(self._state.error)
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
        """Kill the workers; jobs that are not done stay so."""
        self._closing = True
        self._wake()
        self._thread.join()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers of this moment."""
        return [slot.worker.pid for slot in self._slots]

    def submit(self, requests: Sequence[RewardRequest]) -> RewardJob:
        """Start scoring; poll the job."""
        job = RewardJob(self._state, requests)
        with self._state.changed:
            self._queue.extend(_Item(job, index) for index in range(len(job.requests)))
        self._wake()
        return job

    def probe(self, requests: Iterable[RewardRequest]) -> list[str]:
        """Score an empty answer for the first request of each data_source.

        Returns a warning for each that raised, timed out or was not finite: with a real answer it
        may be fine.

        Raises:
            RewardError: a wrong type was returned, or there is no scorer.
        """
        first: dict[str, RewardRequest] = {}
        for request in requests:
            first.setdefault(request.data_source, request._replace(solution_str=""))
        job = self.submit(list(first.values()))
        job.poll(None)
        sources = list(first)
        if job.fatal:
            problems = [f"data_source {sources[i]!r}: {text}" for i, text in job.fatal.items()]
            raise RewardError("reward of an empty answer: " + "; ".join(problems))
        return [
            f"the reward of an empty answer failed for data_source {source!r} ({result.failed}): "
            f"{result.traceback}"
            for source, result in zip(sources, job.results, strict=True)
            if result.failed
        ]

    # From here on: the pool's thread, the only one that touches slots and workers.

    def _serve(self) -> None:
        with ExitStack() as owned:
            owned.push(self._end)
            log = None
            if self._log_path is not None:
                log = owned.enter_context(self._log_path.open("ab"))
            for _ in range(self._num_workers):
                self._slots.append(self._start(log))
            while not self._closing and self._state.error is None:
                self._dispatch()
                self._receive()
                self._replace_late(log)

    def _start(self, log: IO[bytes] | None) -> _Slot:
        setup = (list(self._functions), self._timeout_s)
        worker = WorkerProcess("ppo.rewards.worker", setup, log=log)
        return _Slot(worker, time.monotonic() + START_TIMEOUT_S)

    def _end(self, kind: object, error: BaseException | None, trace: object) -> None:
        for slot in self._slots:
            slot.worker.kill()
        with self._state.changed:
            why = "the reward pool is closed" if error is None else f"the pool broke: {error!r}"
            self._state.error = self._state.error or why
            self._state.changed.notify_all()

    def _all_ready(self) -> bool:
        return len(self._slots) == self._num_workers and all(s.is_ready for s in self._slots)

    def _wake(self) -> None:
        self._wake_out.send_bytes(b"")

    def _dispatch(self) -> None:
        """Give every idle worker a sample, an async one a group."""
        for slot in self._slots:
            if not slot.is_ready or slot.items:
                continue
            group = self._take(ASYNC_GROUP if slot.is_async else 1)
            if not group:
                return
            tasks = []
            for item in group:
                self._number += 1
                slot.items[self._number] = item
                tasks.append(Task(self._number, item.job.requests[item.index]))
            grace = ASYNC_GRACE_S if slot.is_async else 0.0
            slot.deadline = time.monotonic() + self._timeout_s + grace
            slot.worker.send(tasks)

    def _take(self, limit: int) -> list[_Item]:
        group: list[_Item] = []
        with self._state.changed:
            while self._queue and len(group) < limit:
                if self._queue[0].alone and group:
                    break
                group.append(self._queue.popleft())
                if group[-1].alone:
                    break
        return group

    def _receive(self) -> None:
        """Wait for messages until the next deadline, and take all that have come."""
        now = time.monotonic()
        running = [slot.deadline - now for slot in self._slots if slot.items or not slot.is_ready]
        channels: dict[Any, _Slot] = {slot.worker.channel: slot for slot in self._slots}
        for channel in wait([*channels, self._wake_in], max(0.0, min([IDLE_WAIT_S, *running]))):
            if channel is self._wake_in:
                self._wake_in.recv_bytes()
                continue
            slot = channels[channel]
            message = slot.worker.receive()
            if message is None:
                slot.deadline = float("-inf")  # dead: replaced below
                if slot.worker.has_unread:  # killed while idle: another worker scores them
                    with self._state.changed:
                        self._queue.extendleft(reversed(slot.items.values()))
                    slot.items.clear()
            elif message.get("ready"):
                with self._state.changed:
                    slot.is_ready, slot.is_async = True, message["is_async"]
                    self.columns = frozenset(message["columns"])
                    self._state.changed.notify_all()
            elif "broken" in message:
                self._state.error = message["broken"]
            else:
                self._record(slot, message)

    def _record(self, slot: _Slot, message: dict[str, Any]) -> None:
        if message.get("number") not in slot.items:  # it is not the worker that speaks
            slot.deadline = float("-inf")
            return
        item = slot.items.pop(message["number"])
        if "failed" in message:
            result = RewardResult(None, message["failed"], message["traceback"])
        else:
            result = RewardResult(
                message["score"], extra=message["extra"], answer=message["answer"]
            )
        self._finish(item, result, fatal=message.get("is_fatal", False))

    def _finish(self, item: _Item, result: RewardResult, *, fatal: bool = False) -> None:
        with self._state.changed:
            item.job.finish(item.index, result, fatal=fatal)
            self._state.changed.notify_all()

    def _replace_late(self, log: IO[bytes] | None) -> None:
        """Put a new worker in the place of each that died or is over its time."""
        now = time.monotonic()
        for place, slot in enumerate(self._slots):
            is_dead = slot.deadline == float("-inf")
            if not is_dead and (now < slot.deadline or (slot.is_ready and not slot.items)):
                continue
            ending = slot.worker.kill(wait_s=1.0 if is_dead else 0.0)
            if not slot.is_ready:
                how = f"ended ({ending})" if is_dead else f"took over {START_TIMEOUT_S:.0f} s"
                self._state.error = f"a reward worker {how} while it imported the reward function"
                return
            self._give_up(slot, ending if is_dead else None)
            self._slots[place] = self._start(log)

    def _give_up(self, slot: _Slot, ending: str | None) -> None:
        """The samples of a worker that is gone: one has failed; of several, each is tried alone."""
        items = list(slot.items.values())
        if len(items) > 1:
            with self._state.changed:
                self._queue.extendleft(_Item(i.job, i.index, alone=True) for i in items)
            return
        for item in items:
            if ending is None:
                self._finish(item, RewardResult(None, "timeout", late(self._timeout_s)))
            else:
                text = f"the process of the reward function ended: {ending}"
                self._finish(item, RewardResult(None, "error", text))
