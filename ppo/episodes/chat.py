"""A model's chat template and tokenizer, without transformers' tokenizers and torch: conversations
to token ids, and what comes behind a turn that the engine has sampled.

Owns rendering, and the rule that history is never rendered again: the tokens between a turn and
the next are those that the template writes behind a stand-in for that turn. Must not know tools'
code, processes or limits.

Where a template shows no tools, or teaches calls in a format that is not read here, they are shown
as Hermes has them, in the system message; where it writes no message of a tool behind the call,
that is a `<tool_response>` of a user.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from tokenizers import Tokenizer

from ppo.episodes.contract import ChatFormat, ToolFormat
from ppo.episodes.templates import FAILURES, render
from ppo.episodes.tool_calls import FORMATS, ToolCall, take_apart
from ppo.errors import InputError

logger = logging.getLogger(__name__)

MARK = "Stand-in."
USER = {"role": "user", "content": "Begin."}
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_of_tools",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
PROBE = ToolCall("probe_of_tools", {"at": "x"}, "call00000")
PROBE_RESULT = {"role": "tool", "name": PROBE.name, "tool_call_id": PROBE.id, "content": "seen it"}
HERMES = (
    "You may call functions. Their signatures, within <tools></tools>:\n"
    "<tools>\n{tools}\n</tools>\n"
    "For each call write the name and the arguments as JSON within <tool_call></tool_call>:\n"
    '<tool_call>\n{{"name": NAME, "arguments": {{...}}}}\n</tool_call>'
)
Message = Mapping[str, Any]


class HFTokenizer(Protocol):
    """Of transformers, as far as it is read here; only some have a `backend_tokenizer`."""

    @property
    def chat_template(self) -> Any: ...
    @property
    def name_or_path(self) -> str: ...
    @property
    def special_tokens_map(self) -> Mapping[str, Any]: ...


class Turn(NamedTuple):
    """What the next messages come behind."""

    last_id: int | None
    """the last token sampled or written; None before any"""
    calls: Sequence[ToolCall] = ()
    reasoning: str = ""


def chat_format(
    tokenizer: HFTokenizer,
    stop_token_ids: Sequence[int],
    *,
    options: Mapping[str, Any],
    tool_format: ToolFormat = "auto",
    num_ids: int | None = None,
) -> ChatFormat:
    """What processes without transformers' tokenizers need of one.

    Args:
        options: data.apply_chat_template_kwargs.
        num_ids: ids from 0 on that the model has; None = all of the tokenizer.

    Raises:
        InputError: it is none of the package tokenizers, or a conversation in its template cannot
            be continued; the message names it.
    """
    name = str(tokenizer.name_or_path)
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        raise InputError(
            f"the tokenizer {name} has no tokenizer.json: rollout.episode needs one, as its "
            "processes encode without torch"
        )
    template = tokenizer.chat_template
    if isinstance(template, Mapping):  # several of them, by name
        template = template.get("tool_use") or template.get("default")
    if not isinstance(template, str):
        raise InputError(f"the tokenizer {name} has no chat template named default or tool_use")
    special = {k: str(v) for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
    made = ChatFormat(
        *(name, core.to_str(), template, special, tuple(stop_token_ids), dict(options)),
        tool_format=tool_format,
        num_ids=num_ids,
    )
    if tool_format == "auto":
        made = made._replace(tool_format=Chat(made).taught_format() or "hermes")
    Chat(made).check()
    return made


class Chat:
    """Renders, encodes and decodes for one model."""

    def __init__(self, format_: ChatFormat) -> None:
        self.name = format_.name
        self.tool_format: ToolFormat = format_.tool_format
        self._stops = frozenset(format_.stop_token_ids)
        self._core: Tokenizer = Tokenizer.from_str(format_.tokenizer)
        self._core.no_truncation()
        self._core.no_padding()
        size = self._core.get_vocab_size(with_added_tokens=True)
        self.num_ids = size if format_.num_ids is None else min(size, format_.num_ids)
        self._template = format_.template
        options = dict(format_.options)
        options.pop("add_generation_prompt", None)
        self._tools = options.pop("tools", None)
        self._variables = {**format_.special_tokens, **options}

    # Texts and ids.

    def encode(self, text: str) -> list[int]:
        """Ids of a text whose special tokens stand in it.

        Raises ValueError where it has a token that the model does not have.
        """
        ids = self._core.encode(text, add_special_tokens=False).ids
        if (highest := max(ids, default=0)) >= self.num_ids:
            token = self._core.id_to_token(highest)
            raise ValueError(
                f"a text holds the token {token!r} of the tokenizer, whose id is {highest}, and "
                f"the model has {self.num_ids} ids: take it out of what a tool or an episode says"
            )
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ids, with or without special tokens."""
        return self._core.decode(list(ids), skip_special_tokens=not special)

    def text_of(self, ids: Sequence[int]) -> str:
        """What a turn says: without the token that has ended it, with all other special tokens."""
        ended = bool(ids) and ids[-1] in self._stops
        return self.decode(ids[:-1] if ended else ids, special=True)

    def cut(self, text: str, most: int) -> str:
        """The beginning of a text that is at most so many tokens, and says that it is cut."""
        encoded = self._core.encode(text[: most * 32], add_special_tokens=False)
        if len(text) <= most * 32 and len(encoded.ids) <= most:
            return text
        end = encoded.offsets[most - 1][1] if len(encoded.ids) >= most else most * 32
        return f"{text[:end]}\n[{len(text) - end} more characters]"

    # Conversations.

    def begin(self, messages: Sequence[Message], tools: Sequence[dict] | None = None) -> list[int]:
        """Ids of a conversation up to where the model's turn begins. Raises InputError."""
        return self.encode(self._render(messages, tools, generate=True))

    def between(
        self, turn: Turn, messages: Sequence[Message], tools: Sequence[dict] | None = None
    ) -> list[int]:
        """What the template writes between a turn and the next, when `messages` come in between.

        It begins with what stands behind the token that ends a turn; with that token where the turn
        has not ended with it (by a stop text, its length, or another stop token).
        Raises InputError: the template refuses the messages, or changes what came before.
        """
        said = list(messages) if self._knows_tool_messages else _as_user(messages)
        found = self._behind_any(turn, said, tools)
        has_ended = turn.last_id == self.end or turn.last_id in self._stops
        return found[1:] if has_ended and found[:1] == [turn.last_id] else found

    def taught_format(self) -> ToolFormat | None:
        """The format of calls that the template writes; None: none that is read here."""
        conversation = [USER, _standin(calls=[PROBE])]
        try:
            text = self._write(conversation, [PROBE_TOOL], generate=False)
            start = self._write([USER], [PROBE_TOOL], generate=True)
        except InputError:
            return None
        said = text.removeprefix(start).removeprefix(MARK)
        for name in FORMATS:
            calls = take_apart(said, name, [PROBE_TOOL]).calls
            if PROBE[:2] in [call[:2] for call in calls]:
                return name
        return None

    @cached_property
    def end(self) -> int | None:
        """The token that ends a turn in the template: the first behind it that stops the engine,
        else the first that is an added one; None where there is neither."""
        text = self._render([USER, _standin()], None, generate=False)
        if MARK not in text:
            raise self._refused("does not show what an assistant has said")
        added = self._core.get_added_tokens_decoder()
        tail = self.encode(text.rpartition(MARK)[2])
        stops = (i for i in tail if i in self._stops)
        return next(stops, next((i for i in tail if i in added), None))

    def check(self) -> None:
        """InputError when a conversation cannot be continued with a user's or a tool's message."""
        self.between(Turn(self.end), [USER])
        self.between(Turn(self.end, [PROBE]), [PROBE_RESULT], [PROBE_TOOL])
        if not self._shows_tools and self._writes(PROBE.name, [USER], [PROBE_TOOL]):
            logger.warning(
                "the chat template of %s teaches calls of tools in a format that is not read here: "
                "tools are shown as Hermes has them (rollout.episode.tool_format names another)",
                self.name,
            )

    def _behind_any(
        self, turn: Turn, messages: Sequence[Message], tools: Sequence[dict] | None
    ) -> list[int]:
        """`_behind` the first stand-in that the template takes."""
        problem: InputError | None = None
        for standin in _standins(turn if self.end is not None else Turn(turn.last_id)):
            # some templates move the tools to the last user's message: they were shown already
            for no_tools in (False, True):
                try:
                    return self._behind(standin, messages, tools, no_tools=no_tools)
                except InputError as error:
                    problem = problem or error
        assert problem is not None
        raise problem

    def _behind(
        self, standin: Message, messages: Sequence[Message], tools: Any, *, no_tools: bool
    ) -> list[int]:
        """Ids from the end of the stand-in's turn on."""
        head = [USER, standin]
        alone = self._render(head, tools, generate=False, no_tools=no_tools)
        text = self._render([*head, *messages], tools, generate=True, no_tools=no_tools)
        # with the opening of a turn where a template writes an end behind all that is said
        starts = (
            self._render([USER], tools, generate=generate, no_tools=no_tools)
            for generate in (False, True)
        )
        start = next((start for start in starts if text.startswith(start)), None)
        if start is None:
            raise self._refused("writes the beginning anew when more is said")
        if self.end is None:
            if not text.startswith(alone):
                raise self._refused("writes a turn anew when more is said, and marks no end of it")
            return self.encode(text[len(start) :].partition(MARK)[2])
        end = str(self._core.id_to_token(self.end))
        number = alone[len(start) :].count(end)
        turn, same = (_said(each[len(start) :], end, number) for each in (alone, text))
        if number == 0 or turn != same:
            raise self._refused("does not end a turn as it ends the last one")
        ids = self.encode(text)
        ends = [i for i, token in enumerate(ids) if token == self.end]
        return ids[ends[start.count(end) + number - 1] :]

    def _render(
        self, messages: Sequence[Message], tools: Any, *, generate: bool, no_tools: bool = False
    ) -> str:
        shown = None if no_tools else tools or self._tools
        if shown and not self._shows_tools:
            messages, shown = _with_hermes(messages, shown, self._knows_system), None
        return self._write(messages, shown, generate=generate)

    def _write(self, messages: Sequence[Message], tools: Any, *, generate: bool) -> str:
        try:
            return render(
                self._template,
                messages,
                tools=tools,
                add_generation_prompt=generate,
                variables=self._variables,
            )
        except FAILURES as error:
            raise self._refused(f"refuses a message: {error}") from error

    @cached_property
    def _shows_tools(self) -> bool:
        """In its own way, with calls that are read here."""
        is_read = self.tool_format != "hermes" or self.taught_format() == "hermes"
        return is_read and self._writes(PROBE.name, [USER], [PROBE_TOOL])

    @cached_property
    def _knows_system(self) -> bool:
        return self._writes(MARK, [{"role": "system", "content": MARK}, USER])

    @cached_property
    def _knows_tool_messages(self) -> bool:
        """Behind the turn that has called: some write them into that turn."""
        try:
            found = self._behind_any(Turn(None, [PROBE]), [PROBE_RESULT], [PROBE_TOOL])
        except InputError:
            return False
        return PROBE_RESULT["content"] in self.decode(found, special=True)

    def _writes(self, text: str, messages: Sequence[Message], tools: Any = None) -> bool:
        try:
            return text in self._write(messages, tools, generate=True)
        except InputError:
            return False

    def _refused(self, problem: str) -> InputError:
        return InputError(
            f"the chat template of {self.name} {problem}, so a conversation cannot go on token by "
            "token; model.custom_chat_template may name a variant that only adds to what it has "
            "written"
        )


def _said(text: str, end: str, number: int) -> str:
    """What stands there from the stand-in's words on up to the end of its turn, which is the
    `number`th: what a model has said may have some in it.

    Before these words may stand its thinking, which some templates show for the last turn alone.
    """
    said = end.join(text.split(end)[:number])
    return said.partition(MARK)[2] if MARK in said else said


def _standin(calls: Sequence[ToolCall] = (), reasoning: str = "") -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": MARK}
    if reasoning:
        said["reasoning_content"] = reasoning
    if calls:
        said["tool_calls"] = [call.as_message() for call in calls]
    return said


def _standins(turn: Turn) -> list[dict[str, Any]]:
    """The turn with all of its calls; with one, where a template knows no more; with none."""
    kinds = [turn.calls, turn.calls[:1], ()] if turn.calls else [()]
    return [_standin(calls, turn.reasoning) for calls in kinds]


def _as_user(messages: Sequence[Message]) -> list[Message]:
    """Consecutive messages of tools, and what a user says behind them, as one of a user: for
    templates that know no tools, some of which want roles to alternate."""
    said: list[Message] = []
    open_block = False
    for message in messages:
        is_tool = message.get("role") == "tool"
        text = message.get("content")
        if is_tool:
            text = f"<tool_response>\n{text}\n</tool_response>"
        if open_block and message.get("role") in ("tool", "user"):
            said[-1] = {"role": "user", "content": f"{said[-1]['content']}\n{text}"}
        else:
            said.append({"role": "user", "content": text} if is_tool else message)
        open_block = is_tool
    return said


def _with_hermes(
    messages: Sequence[Message], tools: Sequence[Any], knows_system: bool
) -> list[Message]:
    """The tools in the system message, in a new one, or before what the user says first."""
    text = HERMES.format(tools="\n".join(json.dumps(t, ensure_ascii=False) for t in tools))
    first, *others = messages
    if first.get("role") == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *others]
    if knows_system:
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *others]
