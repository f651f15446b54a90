"""Environment classes as TRL's environment_factory and OpenEnv have them, as episodes.

Owns that contract: a constructor without arguments; `reset(**row)`, whose text is appended to the
prompt's last message; every other public method is a tool; `get_reward()` is called at the end (TRL
1.16), or `reward` read.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ppo.episodes.policy import Episode, EpisodeOver, Policy
from ppo.episodes.tools import as_text


def episode_of(environment: type) -> Episode:
    """Play an environment until the policy calls no tool any more, or a limit ends it."""

    async def episode(row: dict[str, Any], policy: Policy) -> float | None:
        env = await policy.in_thread(environment)
        first = await policy.in_thread(lambda: env.reset(**row))
        if inspect.isawaitable(first):
            first = await first
        try:
            await _play(policy, _prompt(policy, first), tools_of(env))
        except EpisodeOver as over:
            policy.end_as(over.finish)
        reward = getattr(env, "get_reward", None) or getattr(env, "reward", None)
        if callable(reward):
            reward = await policy.in_thread(reward)
        if inspect.isawaitable(reward):
            reward = await reward
        return None if reward is None else float(reward)

    return episode


def tools_of(env: Any) -> list[Callable[..., Any]]:
    """Public methods but `reset`, in the order of their definition; properties are left alone."""
    kinds = [vars(kind) for kind in reversed(type(env).__mro__) if kind is not object]
    names = dict.fromkeys(name for kind in kinds for name in kind)
    left_out = ("reset", "reward", "get_reward")
    public = [n for n in names if not n.startswith("_") and n not in left_out]
    static = [n for n in public if callable(inspect.getattr_static(env, n))]
    return [getattr(env, name) for name in static]


def _prompt(policy: Policy, first: Any) -> list[dict[str, Any]]:
    """The data row's messages, with what the environment says first behind the last one."""
    messages = policy.row_messages
    if isinstance(first, list):
        first = "".join(_text_of(part) for part in first)
    if first is not None and (text := as_text(first)):
        messages[-1]["content"] = f"{messages[-1]['content']}{text}"
    return messages


def _text_of(part: Any) -> str:
    """A part of what `reset` returns as messages have it."""
    if isinstance(part, Mapping) and part.get("type") == "text":
        return str(part["text"])
    raise ValueError(f"reset returned {str(part)[:80]}: text alone is read")


async def _play(policy: Policy, messages: list[dict[str, Any]], tools: list[Any]) -> None:
    reply = await policy.chat(messages, tools=tools)
    while reply.tool_calls:
        reply = await policy.chat(await policy.run_tools(reply))
