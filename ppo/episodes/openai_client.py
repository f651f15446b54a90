"""A client as the package openai has them, which asks the policy: for environments that are written
against one, verifiers' legacy environments among them.

Owns `chat.completions.create`: conversations are recognised by their messages, and go on token by
token where the new ones only add to them; any other begins a branch of the episode. Must not import
openai: its classes are used where the user's code has loaded them.

    async def episode(row, policy):
        client = verifiers.OpenAIChatCompletionsClient(OpenAIClient(policy))
        asked = {"prompt": row["prompt"], "answer": row["ground_truth"], "example_id": 0}
        return (await env.run_rollout(asked, client, "policy", {}))["reward"]
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from ppo.episodes.policy import Policy, Reply
from ppo.episodes.tools import text_of_parts

FINISH = {"stop": "stop", "stop_text": "stop", "length": "length"}


class OpenAIClient:
    """`client.chat.completions.create(model=..., messages=..., ...)`, awaited."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._begun: list[tuple[list[Any], Policy]] = []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    async def _create(self, **asked: Any) -> Any:
        made = await self._made(**asked)
        theirs = sys.modules.get("openai.types.chat")
        if theirs is not None:
            return theirs.ChatCompletion.model_validate(made)
        return _with_attributes(made)

    async def post(
        self, path: str, *, body: Mapping[str, Any], cast_to: Any = None, **unused: Any
    ) -> Any:
        """`AsyncOpenAI.post`, for code that names the path itself, as verifiers' does."""
        if path.strip("/") != "chat/completions":
            raise ValueError(f"{path}: the policy answers chat/completions alone")
        httpx = sys.modules.get("httpx")
        if httpx is not None and cast_to is httpx.Response:
            return httpx.Response(200, json=await self._made(**body))
        return await self._create(**body)

    async def close(self) -> None:
        """There is nothing to close."""

    async def _made(
        self,
        *,
        messages: Sequence[Any],
        model: str = "policy",
        tools: Sequence[Mapping[str, Any]] | None = None,
        stop: Sequence[str] | str | None = None,
        max_tokens: int | None = None,
        max_completion_tokens: int | None = None,
        **unused: Any,  # temperature and the like are those of the run
    ) -> dict[str, Any]:
        known, policy, new = self._conversation([_plain(message) for message in messages], tools)
        known.clear()  # who asks meanwhile for what goes on from here gets a branch
        reply = await policy.chat(
            new, tools=tools, stop=stop or (), max_tokens=max_completion_tokens or max_tokens
        )
        message = _message(reply)
        known[:] = [_identity(each) for each in [*map(_plain, messages), message]]
        return _completion(message, reply, model)

    def _conversation(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[list[Any], Policy, list[dict[str, Any]]]:
        """What is known of a conversation, the policy in it, and the messages that are new."""
        identities = [_identity(message) for message in messages]
        for known, policy in sorted(self._begun, key=lambda begun: -len(begun[0])):
            added = messages[len(known) :]
            is_ours = not any(message.get("role") == "assistant" for message in added)
            if known and identities[: len(known)] == known and is_ours:
                return known, policy, added
        begun: tuple[list[Any], Policy]
        if not self._begun:
            begun = [], self._policy
            new = messages
        else:
            begun = [], self._policy.branch(messages, tools=tools or [])
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
    names = [call["function"]["name"] for call in message.get("tool_calls") or []]
    return message.get("role"), message.get("content") or "", tuple(names)


def _plain(message: Any) -> dict[str, Any]:
    """A message as chat templates take it: parts of text as one, arguments of calls as objects."""
    made = {name: value for name, value in _mapping(message).items() if value is not None}
    content = made.get("content", "")
    made["content"] = text_of_parts(content) if isinstance(content, list) else content
    if calls := made.get("tool_calls"):
        made["tool_calls"] = [_plain_call(call) for call in calls]
    return made


def _plain_call(call: Any) -> dict[str, Any]:
    made = dict(_mapping(call))
    function = dict(_mapping(made["function"]))
    if isinstance(function.get("arguments"), str):
        with suppress(ValueError):  # malformed, as the policy has said it
            function["arguments"] = json.loads(function["arguments"])
    return {**made, "function": function}


def _mapping(value: Any) -> Mapping[str, Any]:
    """Of what has been answered too, which callers put into the next request as it is."""
    if isinstance(value, Mapping):
        return value
    return value.model_dump() if hasattr(value, "model_dump") else vars(value)


def _completion(message: dict[str, Any], reply: Reply, model: str) -> dict[str, Any]:
    finish = "tool_calls" if reply.tool_calls else FINISH[reply.finish]
    return {
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


def _with_attributes(value: Any) -> Any:
    if isinstance(value, dict):
        defaults = {"tool_calls": None} if "role" in value else {}
        return SimpleNamespace(**defaults | {k: _with_attributes(v) for k, v in value.items()})
    return [_with_attributes(each) for each in value] if isinstance(value, list) else value
