"""The thread of an episode: its synchronous code runs there, one call after the other.

Owns that thread, and limits of time. What is bound to a thread (a connection of sqlite3, a browser
of Playwright) is made and used in the same one. Must not know tools or conversations.
"""

import asyncio
import resource
import threading
from collections.abc import Awaitable, Callable
from functools import cache
from queue import SimpleQueue
from typing import Any

from ppo.rewards.forks import ended_in_children

UNLIMITED_STACK = 2 << 20
"""bytes of a thread's stack where the process has no limit of it (glibc)"""


class TooSlow(Exception):
    """Our limit is over; a TimeoutError is one of the user's code."""


class Hung:
    """Threads of a process that nobody waits for any more and that have not ended."""

    number = 0


async def within(timeout_s: float, awaited: Awaitable[Any]) -> Any:
    """What comes of it. Raises TooSlow after timeout_s, and whatever it raises itself."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await awaited
    except TimeoutError as error:
        if limit.expired():
            raise TooSlow(f"it took longer than {timeout_s:g} s") from error
        raise


def as_error(raised: BaseException) -> Exception:
    """What code has raised, as an Exception that a future can hold."""
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration):
        return raised
    return RuntimeError(repr(raised))


class EpisodeThread:
    """Starts with the first call. One that takes too long keeps it, and the next begins another.

    Args:
        hung: counts the threads that are left behind so.
    """

    def __init__(self, hung: Hung) -> None:
        self._hung = hung
        self._turn = asyncio.Lock()
        self._calls: SimpleQueue[Callable[[], None] | None] | None = None
        self._is_closed = False

    async def run(self, function: Callable[[], Any], timeout_s: float) -> Any:
        """What `function` returns or raises, when those before it have ended.

        Raises TooSlow timeout_s after it has begun; it goes on then.
        """
        async with self._turn:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[Any] = loop.create_future()
            self._put(lambda: self._call(function, loop, future))
            try:
                return await within(timeout_s, future)
            finally:
                if future.cancelled():
                    self._hung.number += 1
                if future.cancelled() or self._is_closed:
                    self._leave()

    def close(self) -> None:
        """The thread ends when it has nothing to do."""
        self._is_closed = True
        self._leave()

    def _put(self, call: Callable[[], None]) -> None:
        if self._calls is None:
            self._calls = SimpleQueue()
            _make_room()
            threading.Thread(target=_serve, args=(self._calls,), daemon=True).start()
        self._calls.put(call)

    def _leave(self) -> None:
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None

    def _call(
        self,
        function: Callable[[], Any],
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[Any],
    ) -> None:
        value, error = None, None
        try:
            with ended_in_children():
                value = function()
        except BaseException as raised:  # SystemExit too: it is the tool that wants to end
            error = as_error(raised)
        loop.call_soon_threadsafe(self._deliver, future, value, error)

    def _deliver(
        self, future: asyncio.Future[Any], value: Any, error: BaseException | None
    ) -> None:
        if future.done():  # given up
            self._hung.number -= 1
        elif error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


def _make_room() -> None:
    """For the stack of one more thread: all of it counts as memory that the process has, though
    hardly any is used, and a thousand of them would leave none to the user's code."""
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    stack = UNLIMITED_STACK if stack == resource.RLIM_INFINITY else stack
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if _memory_limit() == resource.RLIM_INFINITY:
        return
    wanted = _memory_limit() + stack * (threading.active_count() + 1)
    limit = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


@cache
def _memory_limit() -> int:
    """That of the process before it had threads of episodes."""
    return resource.getrlimit(resource.RLIMIT_DATA)[0]


def _serve(calls: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # and what it holds of the user
