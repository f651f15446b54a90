"""Tools: how one is called within a time limit, and what it answers.

Owns the call, and text out of whatever a tool returns. A tool may raise, hang, fork or return
anything: the model is told, and nothing else happens. Must not know conversations or tokens.
"""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ppo.episodes.schemas import schema_of
from ppo.episodes.threads import EpisodeThread, TooSlow, as_error, within
from ppo.episodes.tool_calls import ToolCall

Status = Literal["ok", "error", "timeout", "parse_error"]
ERROR_CHARS = 500
PARTS = ("text", "image", "image_url", "video", "video_url", "audio", "input_audio")
"""kinds of parts of a message's content, which they have under the name of their kind"""


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
    reward: float = 0.0
    """that the tool has returned beside it"""


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
    call: ToolCall,
    tools: Sequence[Tool],
    *,
    thread: EpisodeThread,
    timeout_s: float,
    read: Callable[[Any], tuple[str, float]] = lambda value: (said_by(value), 0.0),
) -> Answer:
    """Run one call. Never raises for what the call or the tool does wrong.

    Args:
        read: text and reward of what a tool returns; a ValueError says what is wrong with it.
    """
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
            value = await _awaited(function(**arguments), timeout_s)
        else:
            value = await thread.run(lambda: function(**arguments), timeout_s)
            if inspect.isawaitable(value):
                value = await _awaited(value, timeout_s)
        text, reward = read(value)
        return Answer(text, "ok", reward)
    except TooSlow:
        return Answer(f"Error: {call.name} took longer than {timeout_s:g} s", "timeout")
    except Exception as error:  # of the tool: the model is told, as TRL does
        return Answer(
            as_text(f"Error: {str(error) or type(error).__name__}")[:ERROR_CHARS], "error"
        )


async def _awaited(value: Awaitable[Any], timeout_s: float) -> Any:
    """What comes of a tool that is awaited. One that wants to end, or cancels itself, has an error
    as in a thread; it is cancelled where its episode's code is."""
    try:
        return await within(timeout_s, value)
    except (SystemExit, asyncio.CancelledError) as raised:
        task = asyncio.current_task()
        if isinstance(raised, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise as_error(raised) from raised


def said_by(value: Any) -> str:
    """Text of what a tool has returned. Raises ValueError for an image."""
    is_content = isinstance(value, list) and value and all(map(_is_part, value))
    return text_of_parts(value) if is_content else as_text(value)


def text_of_parts(content: Sequence[Any]) -> str:
    """The text of a message's content in parts. Raises ValueError for what is no text."""
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or "text" not in part:
            raise ValueError(f"{str(part)[:80]}: text alone is read, no images or other parts")
    return "".join(as_text(part["text"]) for part in content)


def _is_part(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") in PARTS and value["type"] in value


def as_text(value: Any) -> str:
    """Text of any value: valid Unicode, whatever it was."""
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
