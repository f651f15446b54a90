"""Environment classes as TRL's environment_factory and OpenEnv have them, as episodes.

Owns that contract: a constructor without arguments; `reset(**row)`, whose text is appended to the
prompt's last message; every other public method is a tool; `get_reward()` is called at the end (TRL
1.16), or `reward` read.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any

from ppo.episodes.policy import Episode, EpisodeOver, Policy
from ppo.episodes.schemas import schema_of
from ppo.episodes.tools import Tool, as_text, text_of_parts

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
NO_TOOLS = ("reset", "reward", "get_reward")


def episode_of(environment: type) -> Episode:
    """Play an environment until the policy calls no tool any more, or a limit ends it.

    Raises ValueError, about a class that does not keep the contract; none is made for that.
    """
    _check_calls(environment)
    schemas = {name: _schema(environment, name) for name in tool_names(environment)}

    async def episode(row: dict[str, Any], policy: Policy) -> float | None:
        env = await policy.in_thread(environment)
        columns = _taken(env.reset, row)
        first = await policy.in_thread(lambda: env.reset(**columns))
        if inspect.isawaitable(first):
            first = await first
        try:
            tools = [Tool(schema, getattr(env, name)) for name, schema in schemas.items()]
            await _play(policy, _prompt(policy, first), tools)
        except EpisodeOver as over:
            policy.end_as(over.finish)
        reward = await policy.in_thread(lambda: _reward(env))
        if inspect.isawaitable(reward):
            reward = await reward
        return None if reward is None else float(reward)

    return episode


def tool_names(environment: type) -> list[str]:
    """Public methods but NO_TOOLS, in the order of their definition. What is no bound method of an
    environment is none: static methods, classes, properties and other values."""
    kinds = [vars(kind) for kind in reversed(environment.__mro__) if kind is not object]
    names = dict.fromkeys(name for kind in kinds for name in kind)
    public = [n for n in names if not n.startswith("_") and n not in NO_TOOLS]
    methods = (FunctionType, classmethod)
    return [n for n in public if isinstance(inspect.getattr_static(environment, n), methods)]


def _schema(environment: type, name: str) -> dict[str, Any]:
    """Of a method, whose docstring may be that of a base's."""
    kinds = [vars(kind) for kind in environment.__mro__]
    docs = (inspect.getdoc(kind[name]) for kind in kinds if name in kind)
    found = getattr(environment, name)
    method = found if inspect.ismethod(found) else MethodType(found, environment)
    try:
        return schema_of(method, next(filter(None, docs), None))
    except ValueError as error:
        raise ValueError(
            f"has the public method {name}, which is a tool of the model: {error}; a method that "
            "is no tool has a name that begins with _"
        ) from error


def _check_calls(environment: type) -> None:
    """Whether it can be made without arguments, and `reset` be called with columns by name."""
    made_with: list[inspect.Parameter] = []
    with suppress(ValueError):  # of a base in C, which has no signature
        made_with = _signature(environment)
    needed = [p.name for p in made_with if p.default is p.empty and p.kind not in _VARIADIC]
    if needed:
        raise ValueError(
            f"needs {', '.join(needed)} to be made: an environment is made without arguments; give "
            "them defaults, or read the row in reset(self, **row)"
        )
    reset = getattr(environment, "reset", None)
    if not callable(reset):
        raise ValueError("has no method reset(self, **row), as environments have")
    if isinstance(inspect.getattr_static(environment, "reset"), FunctionType):
        reset = MethodType(reset, environment)
    try:
        parameters = _signature(reset)
    except ValueError as error:
        raise ValueError(f"has a reset without self: {error}") from error
    nameless = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if nameless:
        raise ValueError(
            f"has a reset that does not take {nameless[0]} by name: reset(self, **row)"
        )


def _taken(reset: Callable[..., Any], row: dict[str, Any]) -> dict[str, Any]:
    """The columns that `reset` takes: all, with **row."""
    parameters = _signature(reset)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return row
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: row[p.name] for p in parameters if p.kind in kinds and p.name in row}


def _signature(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _prompt(policy: Policy, first: Any) -> list[dict[str, Any]]:
    """The data row's messages, with what the environment says first behind the last one."""
    messages = policy.row_messages
    text = text_of_parts(first) if isinstance(first, list) else as_text(first)
    if text:
        before = messages[-1]["content"]
        before = text_of_parts(before) if isinstance(before, list) else before
        messages[-1]["content"] = f"{before}{text}"
    return messages


def _reward(env: Any) -> Any:
    """What it returns, or has, which may be a property."""
    reward = getattr(env, "get_reward", None) or getattr(env, "reward", None)
    return reward() if callable(reward) else reward


async def _play(policy: Policy, messages: list[dict[str, Any]], tools: list[Tool]) -> None:
    reply = await policy.chat(messages, tools=tools)
    while reply.tool_calls:
        reply = await policy.chat(await policy.run_tools(reply))
