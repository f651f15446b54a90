"""Tools: how one is called within a time limit, and what it answers.

Owns threads of synchronous tools, and text out of whatever a tool returns. A tool may
raise, hang, fork or return anything: the model is told, and nothing else happens. Must not know
conversations or tokens.
"""

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ppo.episodes.schemas import schema_of
from ppo.episodes.tool_calls import ToolCall
from ppo.rewards.forks import ended_in_children

Status = Literal["ok", "error", "timeout", "parse_error"]
ERROR_CHARS = 500


class Tool(NamedTuple):
    """Something that the model may call."""

    schema: dict[str, Any]
    call: Callable[..., Any] | None
    """None: the episode's code answers its calls"""

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]


class Answer(NamedTuple):
    """What a call has come to."""

    text: str
    status: Status
    value: Any = None
    """as the tool has returned it"""


class Threads:
    """Threads in which the user's synchronous code runs: those that do not end are counted."""

    def __init__(self) -> None:
        self.stuck = 0
        """threads that nobody waits for any more and that have not ended"""

    async def run(self, function: Callable[[], Any], timeout_s: float | None) -> Any:
        """What `function` returns or raises; TimeoutError after timeout_s, it goes on then."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def deliver(value: Any, error: BaseException | None) -> None:
            if future.done():  # given up
                self.stuck -= 1
            elif error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

        def body() -> None:
            value, error = None, None
            try:
                with ended_in_children():
                    value = function()
            except BaseException as raised:  # SystemExit too: it is the tool that wants to end
                error = raised if isinstance(raised, Exception) else RuntimeError(repr(raised))
                if isinstance(error, StopIteration):  # a future cannot hold it
                    error = RuntimeError(repr(raised))
            loop.call_soon_threadsafe(deliver, value, error)

        threading.Thread(target=body, daemon=True).start()
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        finally:
            if future.cancelled():
                self.stuck += 1


def as_tool(given: Any) -> Tool:
    """A function with a docstring and types, or a schema (of which the episode's code takes care).

    Raises ValueError for what describes no tool.
    """
    if isinstance(given, Tool):
        return given
    if isinstance(given, Mapping):
        schema = dict(given) if "function" in given else {"type": "function", "function": given}
        if not isinstance(schema["function"].get("name"), str):
            raise ValueError(f"a tool's schema needs function.name: {given!r}")
        return Tool(schema, None)
    return Tool(schema_of(given), given)


async def answer(
    call: ToolCall, tools: Sequence[Tool], *, threads: Threads, timeout_s: float
) -> Answer:
    """Run one call. Never raises for what the call or the tool does wrong."""
    if call.error is not None:
        return Answer(f"Error: {call.error}", "parse_error")
    tool = next((tool for tool in tools if tool.name == call.name), None)
    if tool is None or tool.call is None:
        names = ", ".join(tool.name for tool in tools if tool.call is not None) or "none"
        problem = f"Error: there is no tool {call.name[:ERROR_CHARS]!r}; there are: {names}"
        return Answer(as_text(problem), "parse_error")
    misfit = _misfit(tool.call, call.arguments)
    if misfit is not None:
        return Answer(as_text(f"Error: {call.name}: {misfit}"), "parse_error")
    function, arguments = tool.call, call.arguments
    try:
        if inspect.iscoroutinefunction(function):
            async with asyncio.timeout(timeout_s):
                value = await function(**arguments)
        else:
            value = await threads.run(lambda: function(**arguments), timeout_s)
            if inspect.isawaitable(value):
                async with asyncio.timeout(timeout_s):
                    value = await value
        return Answer(as_text(value), "ok", value)
    except TimeoutError:
        return Answer(f"Error: {call.name} took longer than {timeout_s:g} s", "timeout")
    except Exception as error:  # of the tool: the model is told, as TRL does
        return Answer(as_text(f"Error: {error or type(error).__name__}")[:ERROR_CHARS], "error")


def as_text(value: Any) -> str:
    """Text of what a tool has returned: valid Unicode, whatever it was."""
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "replace")
    if value is None:
        return ""
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            value = str(value)
    return value.encode("utf-8", "backslashreplace").decode()


def _misfit(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str | None:
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        return str(error)
    except ValueError:  # built in: it has no signature
        return None
    return None
