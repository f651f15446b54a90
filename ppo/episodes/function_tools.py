"""A file of verl's `@function_tool` functions as an episode, without verl.

Owns the two modules that such a file imports, which stand in for verl's: `verl.tools.function_tool`
and, as far as tools return it, `verl.tools.schemas`. Tools that need more of verl are not for it.
"""

import math
import numbers
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ppo.episodes.contract import EpisodeError
from ppo.episodes.policy import Episode, Policy
from ppo.episodes.schemas import schema_of
from ppo.episodes.tools import Tool, answer, said_by
from ppo.plugin import load_module


@dataclass
class ToolResponse:
    """What a tool may return; images and videos are not shown to the policy."""

    text: str | None = None
    image: Any = None
    video: Any = None


def load_function_tools(path: str) -> Episode:
    """The tools that a file registers, called until the policy calls none; reward.* scores it."""
    tools = _registered(path)

    async def episode(row: dict[str, Any], policy: Policy) -> None:
        reply = await policy.chat(tools=tools)
        while reply.tool_calls:
            messages = []
            for call in reply.tool_calls:
                got = await answer(call, tools, **policy.tool_limits, read=_returned)
                messages.append(policy.answered(call, got))
                if got.reward:
                    policy.reward(got.reward)
            reply = await policy.chat(messages)

    return episode


def _registered(path: str) -> list[Tool]:
    tools: list[Tool] = []

    def function_tool(name: Any = None, *, schema: Any = None) -> Any:
        def register(function: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
            described = dict(schema) if schema is not None else schema_of(function)
            if schema is None and name is not None:
                described["function"]["name"] = name
            tools.append(Tool(described, function))
            return function

        return register(name) if callable(name) else lambda function: register(function, name)

    modules = {"function_tool": {"function_tool": function_tool}, "schemas": {}}
    modules["schemas"] = {"ToolResponse": ToolResponse, "OpenAIFunctionToolSchema": dict}
    for name, content in modules.items():
        module = ModuleType(f"verl.tools.{name}")
        vars(module).update(content)
        sys.modules[module.__name__] = module  # looked up before their parents are
    load_module(path)
    if not tools:
        raise EpisodeError(f"rollout.episode: {path}: no function has registered as a tool")
    return tools


def _returned(value: Any) -> tuple[str, float]:
    """Text and reward of a response, (response, reward) or (response, reward, metrics).

    Another tuple is a response as a whole, unless a ToolResponse stands in it: ValueError then.
    """
    response, reward = value, None
    if isinstance(value, tuple) and 1 <= len(value) <= 3:
        first, second, *_ = (*value, None)
        if second is None or (isinstance(second, numbers.Real) and math.isfinite(second)):
            response, reward = first, second
        elif isinstance(first, ToolResponse):
            raise ValueError(f"its reward is {second!r:.80}, not a finite number")
    text = said_by(response.text if isinstance(response, ToolResponse) else response)
    return text, float(reward or 0.0)
