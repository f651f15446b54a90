"""A process that runs episodes: `worker.main(fd, parent)`, started by ppo/episodes/pool.py.

Owns its event loop, on which many episodes wait for the engine at once, and what is said of each
when it ends. Must not import torch: N of these run beside the trainer.

Messages, on one socket: in come pickles of the program's own types, `("begin", EpisodeSpec)` and
`("reply", episode, segment, ids, finish)`; out go JSON lines, the events of
ppo/episodes/transcript.py with the number of their episode, so that nothing that an episode's code
makes is ever unpickled by the trainer.
"""

import asyncio
import os
import pickle
import threading
import time
import traceback
import types
from collections.abc import Coroutine, Generator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from ppo.episodes.chat import Chat
from ppo.episodes.contract import EpisodeError, EpisodeSpec, Limits
from ppo.episodes.policy import Episode, EpisodeOver, Policy, Sampled, Shared
from ppo.episodes.program import load_program, read_score
from ppo.episodes.threads import EpisodeThread, Hung
from ppo.episodes.transcript import as_line
from ppo.rewards.confine import confine
from ppo.rewards.forks import ended_in_children

ALIVE_S = 0.5
"""between two signs of life"""
TRACEBACK_CHARS = 4000


def main(fd: int, parent: int) -> None:
    """Serve until the parent closes its end of the socket `fd`, or dies."""
    channel = confine(fd, parent)
    program, format_, limits = pickle.loads(channel.recv_bytes())
    chat = Chat(format_)
    try:
        with ended_in_children():
            episode = load_program(program)
    except (Exception, SystemExit) as error:  # the user's file: anything
        where = "" if isinstance(error, EpisodeError) else f"importing {program.path} failed:\n"
        channel.send_bytes(as_line({"broken": where + _format(error)}))
        return
    asyncio.run(Worker(channel, chat, limits, episode).serve())


class Worker:
    """The episodes of this process."""

    def __init__(self, channel: Connection, chat: Chat, limits: Limits, episode: Episode) -> None:
        self._channel, self._chat, self._limits, self._episode = channel, chat, limits, episode
        self._hung = Hung()
        self._num_late = 0
        self._sending = threading.Lock()
        self._waiting: dict[tuple[int, int], asyncio.Future[Sampled]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._steps: int | None = None
        """the episode whose code has the event loop"""
        self._has_beaten = True
        """whether the event loop has had time for what is not an episode's"""

    async def serve(self) -> None:
        """Take episodes and replies, for ever: the process ends with its socket."""
        loop = asyncio.get_running_loop()
        self.send({"ready": True})
        threading.Thread(target=self._receive, args=(loop,), daemon=True).start()
        threading.Thread(target=self._sign_of_life, args=(loop,), daemon=True).start()
        await asyncio.Event().wait()

    def send(self, message: dict[str, Any]) -> None:
        """To the parent, from any thread."""
        line = as_line(message)
        with self._sending:
            self._channel.send_bytes(line)

    def _receive(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                loop.call_soon_threadsafe(self._take, pickle.loads(self._channel.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)

    def _sign_of_life(self, loop: asyncio.AbstractEventLoop) -> None:
        missed = 0  # looks, not seconds: on a machine that is too busy nobody is to blame
        while True:
            missed = 0 if self._has_beaten else missed + 1
            if self._has_beaten:
                self._has_beaten = False
                loop.call_soon_threadsafe(self._beats)
            if self._tasks:
                self.tell_of_life(self._steps, missed * ALIVE_S)
            time.sleep(ALIVE_S)

    def _beats(self) -> None:
        self._has_beaten = True

    def tell_of_life(self, episode: int | None, blocked_s: float) -> None:
        """Who has the event loop, for how long, and how much may hang in this process."""
        # what a late episode has left in threads that are not ours is not known
        stuck = self._hung.number + self._num_late
        self.send({"alive": episode, "blocked_s": blocked_s, "stuck": stuck})

    def _take(self, message: tuple[Any, ...]) -> None:
        if message[0] == "begin":
            spec: EpisodeSpec = message[1]
            self._tasks[spec.number] = asyncio.ensure_future(self._run(spec))
            return
        _, episode, segment, ids, finish = message
        future = self._waiting.pop((episode, segment), None)
        if future is not None and not future.done():
            future.set_result(Sampled(ids, finish))

    async def _run(self, spec: EpisodeSpec) -> None:
        """One episode, whatever its code does."""
        link = _Link(self, spec.number)
        thread = EpisodeThread(self._hung)
        shared = Shared(spec, self._chat, self._limits, link, thread)
        policy = Policy(shared)
        ending: dict[str, Any] = {}
        limit = asyncio.timeout(self._limits.timeout_s)
        try:
            async with limit:
                value = await self._stepped(self._episode(spec.row, policy), spec.number)
            score, extra = read_score(value)
            ending = {"score": shared.score if score is None else score, "extra": extra}
        except BaseException as error:  # of the user's code: anything, cancelling itself too
            late = isinstance(error, TimeoutError) and limit.expired()
            self._num_late += late
            if (over := _limit_in(error)) is not None:
                shared.finish = over.finish
                ending = {"score": shared.score}
            else:
                reason = f"no end after {self._limits.timeout_s:g} s" if late else _format(error)
                ending = {"failed": "timeout" if late else "error", "reason": reason}
        ending |= {"finish": shared.finish, "messages": policy.messages}
        try:
            link.tell("end", 0, **ending)
        except (TypeError, ValueError, RecursionError):  # what its code has put into a message
            link.tell("end", 0, **ending | {"messages": []})
        link.is_closed = True
        thread.close()
        del self._tasks[spec.number]
        if self._hung.number or self._num_late:
            self.tell_of_life(None, 0.0)

    @types.coroutine
    def _stepped(self, code: Coroutine[Any, Any, Any], episode: int) -> Generator[Any, Any, Any]:
        """Await the user's code, step by step: who has the event loop is known, a fork that comes
        out of a step ends there, and SystemExit is an error of the episode."""
        value, error = None, None
        while True:
            self._steps = episode
            try:
                with ended_in_children():
                    waits_for = code.send(value) if error is None else code.throw(error)
            except StopIteration as end:
                return end.value
            except (SystemExit, KeyboardInterrupt) as raised:
                error = RuntimeError(repr(raised))
                raise error.with_traceback(raised.__traceback__) from None
            finally:
                self._steps = None
            value, error = None, None
            try:
                value = yield waits_for
            except BaseException as raised:
                error = raised

    async def sample(
        self, episode: int, segment: int, max_tokens: int, stop: Sequence[str]
    ) -> Sampled:
        """Ask the engine; other episodes go on meanwhile."""
        future: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        self._waiting[episode, segment] = future
        self.send({"op": "sample", "e": episode, "s": segment, "max": max_tokens, "stop": stop})
        return await future


class _Link:
    """The events of one episode, until it has ended: tasks that it has left behind say nothing."""

    def __init__(self, worker: Worker, episode: int) -> None:
        self._worker, self._episode = worker, episode
        self.is_closed = False

    def tell(self, op: str, segment: int, **what: Any) -> None:
        if self.is_closed:
            raise EpisodeOver("done")
        self._worker.send({"op": op, "e": self._episode, "s": segment, **what})
        if what.get("status") == "timeout":  # a thread may hang: no more episodes for this process
            self._worker.tell_of_life(None, 0.0)

    async def sample(self, segment: int, max_tokens: int, stop: Sequence[str]) -> Sampled:
        if self.is_closed:
            raise EpisodeOver("done")
        return await self._worker.sample(self._episode, segment, max_tokens, stop)


def _limit_in(error: BaseException) -> EpisodeOver | None:
    """The limit that has been reached, where it is all that was raised: by an asyncio.TaskGroup it
    comes in a group."""
    if isinstance(error, BaseExceptionGroup):
        limits = [_limit_in(each) for each in error.exceptions]
        return limits[0] if all(limits) else None
    return error if isinstance(error, EpisodeOver) else None


def _format(error: BaseException) -> str:
    """Traceback of the user's frames; an error of ours in one line. Valid Unicode."""
    if isinstance(error, EpisodeError):
        return str(error)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(
        ("ppo.", "importlib.", "asyncio.")
    ):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))[-TRACEBACK_CHARS:]
    return text.encode("utf-8", "backslashreplace").decode()
