"""What an episode's code holds: the policy, which it talks to.

Owns conversations (messages, tokens observed and sampled), the limits of an episode, and calls of
tools. Tokens only ever get longer. Must not know processes: what happens goes to a `Link`.
"""

import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple, Protocol

from ppo.episodes.chat import Chat, Message, Turn
from ppo.episodes.contract import MOST_SEGMENTS, EpisodeSpec, Finish, Limits
from ppo.episodes.threads import EpisodeThread
from ppo.episodes.tool_calls import Said, ToolCall, take_apart
from ppo.episodes.tools import Answer, Tool, answer, as_text, as_tool, text_of_parts

LONGEST_TOKEN = 32
"""characters a token at most, when a text is judged too long without being encoded"""


class EpisodeOver(BaseException):  # not an Exception: code that catches these shall not go on
    """A limit has ended the episode: `finish` is max_turns or length.

    What `policy.score` holds is its score then. An episode's code may catch it to return another.
    """

    def __init__(self, finish: str) -> None:
        super().__init__(finish)
        self.finish = finish


class Link(Protocol):
    """Where the events of one episode go; see ppo/episodes/transcript.py."""

    def tell(self, op: str, segment: int, **what: Any) -> None:
        """Something has happened."""
        ...

    async def sample(self, segment: int, max_tokens: int, stop: Sequence[str]) -> "Sampled":
        """A turn of the engine."""
        ...


class Sampled(NamedTuple):
    """Ids and why they ended."""

    ids: list[int]
    finish: Finish


class Reply(NamedTuple):
    """What the policy has said in one turn."""

    text: str
    """without reasoning, calls of tools and the token that ends a turn"""
    tool_calls: list[ToolCall]
    """malformed ones too: their `error` says what is wrong"""
    reasoning: str
    """between <think> and </think>"""
    finish: Finish
    ids: list[int]
    """as sampled"""
    raw: str
    """everything that was sampled, but for the token that ends a turn"""


@dataclass
class Shared:
    """What the conversations of one episode have in common."""

    spec: EpisodeSpec
    chat: Chat
    limits: Limits
    link: Link
    thread: EpisodeThread
    turns: int = 0
    segments: int = 0
    score: float | None = None
    finish: str = "done"


class Policy:
    """One conversation with the policy; an episode begins with one, `branch` begins another.

    A first `chat` without messages begins with the data row's prompt, one with messages begins a
    conversation of its own.
    """

    def __init__(self, shared: Shared, *, parent: "Policy | None" = None) -> None:
        assert shared.segments < MOST_SEGMENTS
        self._shared, self._parent = shared, parent
        self._segment = shared.segments
        shared.segments += 1
        self._tools: list[Tool] = []
        self._messages: list[dict[str, Any]] = parent.messages if parent else []
        self._turn: Turn | None = parent._turn if parent else None  # None: it has not begun
        self._beginning: list[dict[str, Any]] = []  # messages that it will begin with
        self._used = parent._used if parent else 0  # tokens behind the prompt
        self._has_sampled = False
        self._waits = False  # for a turn of the engine

    # For an episode's code.

    @property
    def tokens_left(self) -> int:
        """Tokens that this conversation may still be longer."""
        return max(0, self._shared.limits.max_response_length - self._used)

    @property
    def turns_left(self) -> int:
        """Turns that the episode may still have."""
        return self._shared.limits.max_turns - self._shared.turns

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, for looking at."""
        return [dict(message) for message in self._messages]

    @property
    def score(self) -> float | None:
        """Score of an episode that a limit ends, or whose code returns None; None: reward.*."""
        return self._shared.score

    @score.setter
    def score(self, value: float | None) -> None:
        self._shared.score = None if value is None else _finite(value, "policy.score")

    async def chat(
        self,
        *messages: Message | Sequence[Message] | str,
        tools: Iterable[Any] | None = None,
        stop: Sequence[str] | str = (),
        max_tokens: int | None = None,
    ) -> Reply:
        """Say something and have the policy answer.

        Args:
            messages: one or several, or a list of them; a text is a user's message.
            tools: functions, or schemas; shown at the beginning of a conversation and kept.
            stop: texts that end the turn, besides those of the run; they belong to it.
            max_tokens: of this turn; None = what is left.

        Raises:
            EpisodeOver: a limit is reached; nothing is said then.
            ValueError: a message that the chat template refuses, tools that are not those shown, a
                turn of the policy among the messages, or one that is waited for, no max_tokens.
        """
        said = [self._fitting(message) for message in _flat(messages)]
        if self._turn is not None and any(message["role"] == "assistant" for message in said):
            raise ValueError(
                "policy.chat: this conversation has the policy's turns already: pass what is new "
                "alone; policy.branch(messages) begins one with turns of your own"
            )
        self._take_turn(max_tokens)
        if tools is not None:
            self._show(list(tools))
        schemas = [tool.schema for tool in self._tools] or None
        if self._turn is not None:
            self._observe(self._shared.chat.between(self._turn, said, schemas))
            self._messages += said
        else:
            self._begin(self._beginning + said, schemas)
        return await self._sample(stop, max_tokens)

    async def complete(
        self,
        text: str | Sequence[int] = "",
        *,
        stop: Sequence[str] | str = (),
        max_tokens: int | None = None,
    ) -> Reply:
        """Have the policy go on behind a text or ids, which are appended as they are."""
        self._take_turn(max_tokens)
        if self._turn is None:
            self._begin(self._beginning, [tool.schema for tool in self._tools] or None)
        ids = (
            self._shared.chat.encode(as_text(text))
            if isinstance(text, str)
            else list(map(index, text))
        )
        if not all(0 <= token < self._shared.chat.num_ids for token in ids):
            raise ValueError(f"policy.complete: ids must lie below {self._shared.chat.num_ids}")
        if ids:
            self._observe(ids)
            said = self._shared.chat.decode(ids, special=True)
            if self._messages and self._messages[-1]["role"] == "assistant":
                self._messages[-1]["content"] += said
            else:
                self._messages.append({"role": "assistant", "content": said})
        return await self._sample(stop, max_tokens, goes_on=True)

    def reward(self, value: float) -> None:
        """Reward of the last token sampled so far. Raises ValueError where there is none."""
        number = _finite(value, "policy.reward")
        if not self._has_sampled:
            raise ValueError("policy.reward: this conversation has no sampled token yet")
        self._shared.link.tell("reward", self._segment, value=number)

    def branch(
        self,
        *messages: Message | Sequence[Message] | str,
        tools: Iterable[Any] | None = None,
    ) -> "Policy":
        """Another conversation of this episode: with messages of its own (and tools, else those of
        this one), or, without, one that goes on from here. It has the episode's score and counts in
        its group."""
        if self._shared.segments >= MOST_SEGMENTS:
            raise ValueError(f"an episode has at most {MOST_SEGMENTS} conversations")
        said = [self._fitting(message) for message in _flat(messages)]
        goes_on = not said and self._turn is not None
        if goes_on:
            self._check_rests()
        branch = Policy(self._shared, parent=self if goes_on else None)
        branch._tools = list(self._tools) if tools is None else [as_tool(t) for t in tools]
        if goes_on:
            self._shared.link.tell("fork", branch._segment, parent=self._segment)
        else:
            branch._beginning = said or [dict(message) for message in self._beginning]
        return branch

    async def run_tools(self, reply: Reply) -> list[dict[str, Any]]:
        """Call what a reply asks for, one after the other; the messages to go on with.

        A call that is malformed, of an unknown tool, raises or is too slow is a message too.
        """
        return [await self._run(call) for call in reply.tool_calls]

    async def _run(self, call: ToolCall) -> dict[str, Any]:
        return self.answered(call, await answer(call, self._tools, **self.tool_limits))

    def answered(self, call: ToolCall, got: Answer) -> dict[str, Any]:
        """The message of a call that has been answered, which is counted."""
        text = self._cut(got.text)
        told = {"name": call.name, "arguments": call.arguments, "status": got.status}
        self._shared.link.tell("tool", self._segment, result=text, **told)
        return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text}

    # For adapters.

    @property
    def row_messages(self) -> list[dict[str, Any]]:
        """The prompt of the data row, as messages; a copy."""
        return _row_messages(self._shared.spec)

    @property
    def tool_limits(self) -> dict[str, Any]:
        """Arguments of `tools.answer`."""
        limit = self._shared.limits.tool_timeout_s
        return {"thread": self._shared.thread, "timeout_s": limit}

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        """Run synchronous code of the user, within the time of the episode."""
        return await self._shared.thread.run(function, self._shared.limits.timeout_s)

    def end_as(self, finish: str) -> None:
        """Why the episode ends, where its code has caught EpisodeOver."""
        self._shared.finish = finish

    # Inside.

    def _check_rests(self) -> None:
        if self._waits:
            raise ValueError(
                "this conversation waits for a turn already: policy.branch() first, then ask both; "
                "behind one that was given up policy.branch(messages) begins another"
            )

    def _take_turn(self, max_tokens: int | None) -> None:
        """Whether there is one, before anything is said."""
        self._check_rests()
        if max_tokens is not None and index(max_tokens) < 1:
            raise ValueError(f"max_tokens = {max_tokens}: must be at least 1")
        if self.turns_left <= 0:
            raise EpisodeOver("max_turns")
        if self.tokens_left <= 0:
            raise EpisodeOver("length")

    def _show(self, given: list[Any]) -> None:
        tools = [as_tool(each) for each in given]
        if self._turn is not None and [t.schema for t in tools] != [t.schema for t in self._tools]:
            raise ValueError(
                "tools are shown where a conversation begins, and stay: policy.branch(messages) "
                "begins one with others"
            )
        self._tools = tools

    def _begin(self, said: list[dict[str, Any]], schemas: list[dict[str, Any]] | None) -> None:
        """Open the segment: with messages of its own, or with those of the data row."""
        spec, chat, limits = self._shared.spec, self._shared.chat, self._shared.limits
        self._messages = said or _row_messages(spec)
        ids = spec.prompt_ids
        if said or schemas:
            ids = chat.begin(self._messages, schemas)
        if not ids:
            raise ValueError("the chat template makes no token of the messages")
        over = max(0, len(ids) - limits.max_prompt_length)
        self._used += over  # what begins with no room for a turn has none left either
        if over >= limits.max_response_length:
            self._shared.link.tell("open", self._segment, ids=ids[: limits.max_prompt_length])
            raise EpisodeOver("length")
        self._shared.link.tell("open", self._segment, ids=ids if said or schemas else None)
        self._turn = Turn(ids[-1])

    def _observe(self, ids: list[int]) -> None:
        """Append what was not sampled, if it leaves room for a token."""
        if len(ids) >= self.tokens_left:
            raise EpisodeOver("length")
        self._used += len(ids)
        self._shared.link.tell("observe", self._segment, ids=ids)
        self._turn = Turn(ids[-1]) if ids else self._turn

    async def _sample(
        self, stop: Sequence[str] | str, max_tokens: int | None, *, goes_on: bool = False
    ) -> Reply:
        most = self.tokens_left if max_tokens is None else min(self.tokens_left, index(max_tokens))
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        self._shared.turns += 1
        self._waits = True  # for ever where its code gives up: the engine has that turn
        ids, finish = await self._shared.link.sample(self._segment, most, [s for s in stops if s])
        self._used += len(ids)
        self._has_sampled, self._waits = True, False
        raw = self._shared.chat.text_of(ids)
        said = self._taken_apart(raw)
        self._turn = Turn(ids[-1] if ids else None, said.calls, said.reasoning)
        if goes_on and self._messages and self._messages[-1]["role"] == "assistant":
            self._messages[-1]["content"] += raw
        else:
            self._messages.append(_message(said))
        return Reply(said.text, said.calls, said.reasoning, finish, ids, raw)

    def _taken_apart(self, raw: str) -> Said:
        schemas = [tool.schema for tool in self._tools]
        return take_apart(raw, self._shared.chat.tool_format, schemas)

    def _fitting(self, message: Message) -> dict[str, Any]:
        """A message as it is appended: its text valid, and cut at max_observation_tokens."""
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"a message needs a role and a content: {message!r}"[:500])
        content = message.get("content")
        text = text_of_parts(content) if isinstance(content, list) else as_text(content)
        return {**message, "content": self._cut(text)}

    def _cut(self, text: str) -> str:
        limits = self._shared.limits
        if limits.max_observation_tokens is not None:
            return self._shared.chat.cut(text, limits.max_observation_tokens)
        most = limits.max_prompt_length + limits.max_response_length
        return text[: most * LONGEST_TOKEN]  # what is longer fits nowhere, and takes long to encode


Episode = Callable[[dict[str, Any], Policy], Coroutine[Any, Any, Any]]
"""the user's code: a row and the policy; see `read_score` for what it returns"""


def _finite(value: float, what: str) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what}: {value!r} is not a finite number")
    return number


def _flat(given: Sequence[Message | Sequence[Message] | str]) -> list[Message]:
    found: list[Message] = []
    for each in given:
        if isinstance(each, str):
            found.append({"role": "user", "content": each})
        elif isinstance(each, Mapping):
            found.append(each)
        else:
            found += _flat(each)
    return found


def _row_messages(spec: EpisodeSpec) -> list[dict[str, Any]]:
    if isinstance(spec.messages, str):
        return [{"role": "user", "content": spec.messages}]
    return [dict(message) for message in spec.messages]


def _message(said: Said) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.text}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message["tool_calls"] = [call.as_message() for call in said.calls]
    return message
