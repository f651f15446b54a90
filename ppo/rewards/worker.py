"""A scoring process: `worker.main(fd, parent)`, started by ppo/rewards/process.py.

Owns its loop: take a group of samples, answer each. Must not import torch: N of these run beside
the trainer.

Messages, on one socket: in come pickles of the program's own types; out go JSON lines, so that
nothing a reward function makes is ever unpickled by the trainer.
"""

import asyncio
import inspect
import json
import pickle
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from ppo.rewards.confine import confine
from ppo.rewards.contract import Function, RewardError, RewardRequest
from ppo.rewards.forks import ended_in_children
from ppo.rewards.function import Loaded, Scored, call, combine, load_function, read

TRACEBACK_CHARS = 4000


class Task(NamedTuple):
    """One sample on its way to a worker."""

    number: int
    request: RewardRequest


def main(fd: int, parent: int) -> None:
    """Serve until the parent closes its end of the socket `fd`, or dies."""
    channel = confine(fd, parent)
    given, timeout_s = pickle.loads(channel.recv_bytes())
    with ended_in_children():
        functions = _load(given, channel)
    if functions is None:
        return
    is_async = any(inspect.iscoroutinefunction(loaded.call) for loaded in functions)
    columns = sorted(frozenset[str]().union(*(loaded.columns for loaded in functions)))
    _send(channel, {"ready": True, "is_async": is_async, "columns": columns})
    with asyncio.Runner() as runner, suppress(EOFError, ConnectionError):
        while True:
            tasks: list[Task] = pickle.loads(channel.recv_bytes())
            if is_async:
                runner.run(_score_together(functions, tasks, timeout_s, channel))
                continue
            for task in tasks:
                _send(channel, _score(functions, task, runner))


def _load(given: Sequence[Function], channel: Connection) -> list[Loaded] | None:
    """The functions; None when one cannot be had, which the parent is told."""
    functions = []
    for function in given:
        try:
            functions.append(load_function(function))
        except RewardError as error:
            _send(channel, {"broken": str(error)})
            return None
        except (Exception, SystemExit) as error:  # the user's file: anything
            where = f"reward.function: importing {function.path} failed"
            _send(channel, {"broken": f"{where}:\n{_format(error)}"})
            return None
    return functions


def _score(functions: Sequence[Loaded], task: Task, runner: asyncio.Runner) -> dict[str, Any]:
    try:
        scored = []
        for loaded in functions:
            with ended_in_children():
                value = call(loaded, task.request)
                if inspect.isawaitable(value):
                    value = runner.run(_awaited(value))
            scored.append(read(value, loaded.function))
        return _success(task, functions, scored)
    except (Exception, SystemExit) as error:  # it costs this sample only
        return _failure(task, error)


async def _awaited(value: Any) -> Any:
    return await value


async def _score_together(
    functions: Sequence[Loaded], tasks: Sequence[Task], timeout_s: float, channel: Connection
) -> None:
    """Score all at once, each under its own time limit."""

    async def score(task: Task) -> None:
        limit, scored = asyncio.timeout(timeout_s), []
        try:
            async with limit:
                for loaded in functions:
                    with ended_in_children():
                        value = call(loaded, task.request)
                        if inspect.isawaitable(value):
                            value = await value
                    scored.append(read(value, loaded.function))
            answer = _success(task, functions, scored)
        except (Exception, SystemExit) as error:  # as in _score
            answer = _failure(task, error)
            if limit.expired():
                answer["failed"], answer["traceback"] = "timeout", late(timeout_s)
        _send(channel, answer)

    await asyncio.gather(*(score(task) for task in tasks))


def late(timeout_s: float) -> str:
    """What is said about a sample over the limit."""
    return f"no result after reward.timeout_s = {timeout_s:g} s"


def _success(task: Task, functions: Sequence[Loaded], scored: Sequence[Scored]) -> dict[str, Any]:
    total = combine([loaded.function for loaded in functions], scored)
    said = {"score": total.score, "extra": dict(total.extra), "answer": total.answer}
    return {"number": task.number, **said}


def _failure(task: Task, error: BaseException) -> dict[str, Any]:
    return {
        "number": task.number,
        "failed": "error",
        "traceback": _format(error),
        "is_fatal": isinstance(error, RewardError),
    }


def _format(error: BaseException) -> str:
    """Traceback without the frames of this file; an error of the contract in one line.

    It goes to logs and files: what is no valid Unicode is written as \\udXXX.
    """
    if isinstance(error, RewardError):
        return str(error).encode("utf-8", "backslashreplace").decode()
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(
        "ppo.rewards."
    ):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))[-TRACEBACK_CHARS:]
    return text.encode("utf-8", "backslashreplace").decode()


def _send(channel: Connection, message: dict[str, Any]) -> None:
    channel.send_bytes(json.dumps(message).encode())
