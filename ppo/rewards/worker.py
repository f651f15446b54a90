"""A scoring process: `worker.main(fd, parent)`, started by ppo/rewards/process.py.

Owns what a worker does to itself (limits, death with its parent) and its loop: take a
group of samples, answer each. Must not import torch: N of these run beside the trainer.

Messages, on one socket: in come pickles of the program's own types; out go JSON lines, so that
nothing a reward function makes is ever unpickled by the trainer.
"""

import asyncio
import ctypes
import inspect
import json
import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from ppo.rewards.contract import RewardError, RewardRequest
from ppo.rewards.forks import begin_children_afresh, ended_in_children, ignore_signals
from ppo.rewards.function import call, load_function, read

MEMORY_LIMIT_GIB = 8
"""private memory of a worker; a function that needs more gets a MemoryError"""
TRACEBACK_CHARS = 4000
PARENT_WATCH_S = 1.0


class Function(NamedTuple):
    """Section `reward.function`, in a form that travels."""

    path: str | None
    name: str
    kwargs: dict[str, Any]
    style: str


class Task(NamedTuple):
    """One sample on its way to a worker."""

    number: int
    request: RewardRequest


def main(fd: int, parent: int) -> None:
    """Serve until the parent closes its end of the socket `fd`, or dies."""
    _die_with(parent)
    ignore_signals()
    _limit_resources()
    os.set_inheritable(fd, False)  # by what the function executes
    channel = Connection(fd)
    begin_children_afresh(channel)
    settings, timeout_s = pickle.loads(channel.recv_bytes())
    with ended_in_children():
        function = _load(settings, channel)
    if function is None:
        return
    is_async = inspect.iscoroutinefunction(function)
    _send(channel, {"ready": True, "is_async": is_async})
    with asyncio.Runner() as runner, suppress(EOFError, ConnectionError):
        while True:
            tasks: list[Task] = pickle.loads(channel.recv_bytes())
            if is_async:
                runner.run(_score_together(function, settings, tasks, timeout_s, channel))
                continue
            for task in tasks:
                _send(channel, _score(function, settings, task, runner))


def _die_with(parent: int) -> None:
    """End when the parent ends, however it does."""
    with suppress(OSError, AttributeError):  # Linux
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _limit_resources() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = MEMORY_LIMIT_GIB << 30
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or hard > limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, a worker goes before the trainer
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _load(settings: Function, channel: Connection) -> Callable[..., Any] | None:
    """The function; None when it cannot be had, which the parent is told."""
    try:
        return load_function(settings)
    except RewardError as error:
        _send(channel, {"broken": str(error)})
    except (Exception, SystemExit) as error:  # the user's file: anything
        where = f"reward.function: importing {settings.path} failed"
        _send(channel, {"broken": f"{where}:\n{_format(error)}"})
    return None


def _score(
    function: Callable[..., Any], settings: Function, task: Task, runner: asyncio.Runner
) -> dict[str, Any]:
    try:
        with ended_in_children():
            value = call(function, settings, task.request)
            if inspect.isawaitable(value):
                value = runner.run(_awaited(value))
        return _success(task, value, settings)
    except (Exception, SystemExit) as error:  # it costs this sample only
        return _failure(task, error)


async def _awaited(value: Any) -> Any:
    return await value


async def _score_together(
    function: Callable[..., Any],
    settings: Function,
    tasks: list[Task],
    timeout_s: float,
    channel: Connection,
) -> None:
    """Score all at once, each under its own time limit."""

    async def score(task: Task) -> None:
        limit = asyncio.timeout(timeout_s)
        try:
            with ended_in_children():
                async with limit:
                    value = await call(function, settings, task.request)
            answer = _success(task, value, settings)
        except (Exception, SystemExit) as error:  # as in _score
            answer = _failure(task, error)
            if limit.expired():
                answer["failed"], answer["traceback"] = "timeout", late(timeout_s)
        _send(channel, answer)

    await asyncio.gather(*(score(task) for task in tasks))


def late(timeout_s: float) -> str:
    """What is said about a sample over the limit."""
    return f"no result after reward.timeout_s = {timeout_s:g} s"


def _success(task: Task, value: Any, settings: Function) -> dict[str, Any]:
    scored = read(value, settings)
    return {"number": task.number, "score": scored.score, "extra": scored.extra}


def _failure(task: Task, error: BaseException) -> dict[str, Any]:
    return {
        "number": task.number,
        "failed": "error",
        "traceback": _format(error),
        "is_fatal": isinstance(error, RewardError),
    }


def _format(error: BaseException) -> str:
    """Traceback without the frames of this file; an error of the contract in one line."""
    if isinstance(error, RewardError):
        return str(error)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(
        "ppo.rewards."
    ):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))[-TRACEBACK_CHARS:]


def _send(channel: Connection, message: dict[str, Any]) -> None:
    channel.send_bytes(json.dumps(message).encode())
