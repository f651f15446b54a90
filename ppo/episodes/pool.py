"""Episodes of a replica: specs in, turns that they ask for and results out.

Owns what goes between the engine's thread and the pool's own, in which processes are looked after
while the engine works. Must not know the engine.
"""

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Pipe
from pathlib import Path
from types import TracebackType
from typing import Self

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
from ppo.episodes.processes import Processes
from ppo.episodes.program import check_program
from ppo.episodes.running import Running
from ppo.episodes.transcript import BadEvent

KEY = "rollout.episode: "


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
        self._processes: Processes | None = None
        self._held = 0
        self._closing = False
        # the pool's thread alone
        self._running: dict[int, Running] = {}
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
        return [] if self._processes is None else self._processes.pids

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
            processes = Processes(self._num_workers, self._setup, self._limits, self, log)
            owned.callback(processes.kill)
            self._processes = processes
            while not self._closing and self._error is None:
                self._take_inbox(processes)
                processes.hand_out()
                self._held = processes.held
                processes.receive(self._wake_in)
                processes.replace()

    def _end(self, kind: object, error: BaseException | None, trace: object) -> None:
        why = "the episode pool is closed" if error is None else f"the pool broke: {error!r}"
        with self._changed:
            self._error = self._error or why
            self._changed.notify_all()

    def _take_inbox(self, processes: Processes) -> None:
        while True:
            with self._changed:
                if not self._inbox:
                    return
                what = self._inbox.popleft()
            if isinstance(what, threading.Event):
                processes.drop_all()
                self._running.clear()
                what.set()
                continue
            for each in what:
                if isinstance(each, TurnReply):
                    self._answer(each)
                else:
                    self._begin(each, processes)

    def _begin(self, spec: EpisodeSpec, processes: Processes) -> None:
        running = self._running[spec.number] = Running(spec, self._limits)
        if running.tape is None:
            processes.add(running)
        else:
            self._go_on(running)

    def _go_on(self, running: Running) -> None:
        """Feed a tape until it waits."""
        assert running.tape is not None
        try:
            for request in next(running.tape, []):
                self.asked(running, request)
        except BadEvent as error:
            self.ended(running, "error", f"the tape does not fit: {error}")
            return
        if running.transcript.ending is not None:
            self.ended(running)

    def _answer(self, reply: TurnReply) -> None:
        running = self._running.get(reply.episode)
        if running is not None:  # else it has failed meanwhile
            self._pass_on(running, running.answer(reply))

    def _pass_on(self, running: Running, what: TurnReply | TurnRequest | None) -> None:
        """A request to the engine, a reply to the episode."""
        if isinstance(what, TurnRequest):
            with self._changed:
                self._requests.append(what)
                self._changed.notify_all()
        elif what is not None:
            running.transcript.answer(what)
            if running.tape is not None:
                self._go_on(running)
                return
            assert self._processes is not None
            said = (what.episode, what.segment, what.ids.tolist(), what.finish)
            self._processes.tell(what.episode, "reply", *said)

    # What the processes say, in the pool's thread too.

    def ready(self) -> None:
        """See `Listener`."""
        with self._changed:
            self._num_ready += 1
            self._changed.notify_all()

    def broken(self, problem: str) -> None:
        """See `Listener`."""
        with self._changed:
            self._error = f"{KEY}{problem.removeprefix(KEY)}"
            self._changed.notify_all()

    def asked(self, running: Running, request: TurnRequest) -> None:
        """See `Listener`."""
        self._pass_on(running, running.ask(request))

    def ended(self, running: Running, failed: str | None = None, reason: str = "") -> None:
        """See `Listener`."""
        result = running.transcript.result(self._chat, failed=failed, reason=reason)
        del self._running[running.spec.number]
        with self._changed:
            self._results.append(result)
            self._changed.notify_all()
