"""A client as the package openai has them, which asks the policy: for environments that are written
against one, verifiers' legacy environments among them.

Owns `chat.completions.create`: conversations are recognised by their messages, and go on token by
token where the new ones only add to them; any other begins a branch of the episode. Must not import
openai: its classes are used where the user's code has loaded them.

    async def episode(row, policy):
        client = OpenAIClient(policy)
        state = await env.rollout(row, client, model="policy")
        return state["reward"]
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ppo.episodes.policy import Policy, Reply

FINISH = {"stop": "stop", "stop_text": "stop", "length": "length"}


class OpenAIClient:
    """`client.chat.completions.create(model=..., messages=..., ...)`, awaited."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._begun: list[tuple[list[Any], Policy]] = []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    async def _create(
        self,
        *,
        messages: Sequence[Mapping[str, Any]],
        model: str = "policy",
        tools: Sequence[Mapping[str, Any]] | None = None,
        stop: Sequence[str] | str | None = None,
        max_tokens: int | None = None,
        max_completion_tokens: int | None = None,
        **unused: Any,  # temperature and the like are those of the run
    ) -> Any:
        known, policy, new = self._conversation([dict(message) for message in messages], tools)
        reply = await policy.chat(
            new, tools=tools, stop=stop or (), max_tokens=max_completion_tokens or max_tokens
        )
        message = _message(reply)
        known[:] = [_identity(each) for each in [*messages, message]]
        return _completion(message, reply, model)

    def _conversation(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[list[Any], Policy, list[dict[str, Any]]]:
        """What is known of a conversation, the policy in it, and the messages that are new."""
        identities = [_identity(message) for message in messages]
        for known, policy in sorted(self._begun, key=lambda begun: -len(begun[0])):
            if known and identities[: len(known)] == known:
                return known, policy, messages[len(known) :]
        begun: tuple[list[Any], Policy]
        if not self._begun:
            begun = [], self._policy
            new = messages
        else:
            begun = [], self._policy.branch(messages, tools=tools)
            new = []
        self._begun.append(begun)
        return *begun, new


def _message(reply: Reply) -> dict[str, Any]:
    """An assistant's message as the API has it."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in reply.tool_calls
    ]
    said: dict[str, Any] = {"role": "assistant", "content": reply.text}
    return said | ({"tool_calls": calls} if calls else {})


def _identity(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells a message from another: what callers add to it, or leave out, does not."""
    calls = message.get("tool_calls") or []
    functions = [call["function"] if isinstance(call, Mapping) else call.function for call in calls]
    names = [f["name"] if isinstance(f, Mapping) else f.name for f in functions]
    return message.get("role"), message.get("content") or "", tuple(names)


def _completion(message: dict[str, Any], reply: Reply, model: str) -> Any:
    finish = "tool_calls" if reply.tool_calls else FINISH[reply.finish]
    made = {
        "id": f"chatcmpl-{time.monotonic_ns()}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": {
            "prompt_tokens": 0,
            "completion_tokens": len(reply.ids),
            "total_tokens": len(reply.ids),
        },
    }
    theirs = sys.modules.get("openai.types.chat")
    if theirs is not None:
        return theirs.ChatCompletion.model_validate(made)
    return _with_attributes(made)


def _with_attributes(value: Any) -> Any:
    if isinstance(value, dict):
        defaults = {"tool_calls": None} if "role" in value else {}
        return SimpleNamespace(**defaults | {k: _with_attributes(v) for k, v in value.items()})
    return [_with_attributes(each) for each in value] if isinstance(value, list) else value
