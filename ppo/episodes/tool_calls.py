"""Calls of tools in what a model has said, by the format that its chat template teaches.

Owns the formats. Malformed calls are calls too, with what is wrong with them: the model is told.
Must not know tokens or how tools are run.

- hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen2.5, Qwen3)
- qwen3_xml: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...` (Qwen3-Coder)
- llama3: `{"name": ..., "parameters": {...}}`, alone or behind `<|python_tag|>`, `;` in between
- mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, `[TOOL_CALLS]NAME[ARGS]{...}`
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ppo.episodes.contract import ToolFormat

SHOWN_CHARS = 200


class ToolCall(NamedTuple):
    """One call, or what stands in its place."""

    name: str
    arguments: dict[str, Any]
    id: str
    """nine letters and digits, which Mistral's templates insist on"""
    error: str | None = None
    """what is wrong with it; it calls nothing then"""

    def as_message(self) -> dict[str, Any]:
        """As chat templates have it in an assistant's message."""
        called = {"name": self.name, "arguments": self.arguments}
        return {"type": "function", "id": self.id, "function": called}


class Said(NamedTuple):
    """A turn, taken apart."""

    text: str
    """without reasoning and calls"""
    reasoning: str
    calls: list[ToolCall]


def take_apart(text: str, format_: ToolFormat, tools: Sequence[Mapping[str, Any]] = ()) -> Said:
    """Reasoning, calls and the rest of what a model has said.

    Args:
        tools: schemas; without any nothing is a call. They give XML's values their types.
    """
    head, closed, rest = text.partition("</think>")
    before, opened, thought = head.rpartition("<think>")
    if closed:
        reasoning, said = thought.strip(), rest.lstrip()
    elif opened:  # a turn that was cut in its thoughts
        reasoning, said = thought.strip(), before.strip()
    else:
        reasoning, said = "", text
    if not tools:
        return Said(said, reasoning, [])
    left, found = FORMATS[format_](said, tools)
    calls = [ToolCall(name, args, f"call{i:05d}", bad) for i, (name, args, bad) in enumerate(found)]
    return Said(left.strip() if calls else said, reasoning, calls)


Found = tuple[str, dict[str, Any], str | None]
Parser = Callable[[str, Sequence[Mapping[str, Any]]], tuple[str, list[Found]]]
_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def _hermes(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Found]]:
    found = [_of_json(block) for block in _BLOCK.findall(text)]
    return _BLOCK.sub("", text), found


def _qwen3_xml(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Found]]:
    found: list[Found] = []
    for block in _BLOCK.findall(text):
        function = re.search(r"<function=([^<>\n]+)>(.*?)(</function>|\Z)", block, re.DOTALL)
        if function is None:
            found.append(_malformed(block, "expected <function=NAME>"))
            continue
        name = function[1].strip()
        pattern = r"<parameter=([^<>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)"
        values = re.findall(pattern, function[2], re.DOTALL)
        types = _types_of(name, tools)
        found.append((name, {k.strip(): _typed(v, types.get(k.strip())) for k, v in values}, None))
    return _BLOCK.sub("", text), found


def _llama3(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Found]]:
    before, tag, rest = text.partition("<|python_tag|>")
    body = (rest if tag else text).strip()
    if not tag and not (body.startswith("{") and '"name"' in body):
        return text, []
    found: list[Found] = []
    while body:
        try:
            value, end = json.JSONDecoder().raw_decode(body)
        except (ValueError, RecursionError) as error:
            found.append(_malformed(body, str(error)))
            break
        found.append(_of_value(value, body))
        body = body[end:].lstrip("; \n")
    return before if tag else "", found


def _mistral(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Found]]:
    before, *blocks = text.split("[TOOL_CALLS]")
    found: list[Found] = []
    for block in blocks:
        name, has_args, args = block.partition("[ARGS]")
        name = name.partition("[CALL_ID]")[0].strip()
        if has_args or re.match(r"[\w.-]+\s*\{", block.strip()):  # newer: NAME[ARGS]{...}
            if not has_args:
                name, _, args = block.strip().partition("{")
                args = "{" + args
            found.append(_of_json(f'{{"name": {json.dumps(name.strip())}, "arguments": {args}}}'))
            continue
        try:
            values = json.JSONDecoder().raw_decode(block.strip())[0]
        except (ValueError, RecursionError) as error:
            found.append(_malformed(block, str(error)))
            continue
        found += [_of_value(v, block) for v in (values if isinstance(values, list) else [values])]
    return before, found


FORMATS: dict[ToolFormat, Parser] = {
    "hermes": _hermes,
    "qwen3_xml": _qwen3_xml,
    "llama3": _llama3,
    "mistral": _mistral,
}


def _of_json(text: str) -> Found:
    try:
        return _of_value(json.loads(text), text)
    except (ValueError, RecursionError) as error:
        return _malformed(text, str(error))


def _of_value(value: Any, text: str) -> Found:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _malformed(text, 'expected an object with "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON within JSON, as OpenAI has it
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return _malformed(text, f"arguments: {error}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return _malformed(text, "the arguments must be an object")
    try:
        json.dumps(value, ensure_ascii=False).encode()  # JSON may name half a surrogate pair
    except (UnicodeEncodeError, RecursionError):
        return _malformed(text, "not valid Unicode")
    return value["name"], arguments, None


def _malformed(text: str, problem: str) -> Found:
    return "malformed", {}, f"malformed call of a tool ({problem}): {text.strip()[:SHOWN_CHARS]}"


def _types_of(name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = function.get("parameters", {}).get("properties", {})
            return {key: value.get("type") for key, value in properties.items()}
    return {}


def _typed(text: str, kind: Any) -> Any:
    """A value between XML's tags: text stays text, everything else is JSON if it can be read."""
    text = text.removeprefix("\n").removesuffix("\n")
    if kind in (None, "string"):
        return text
    try:
        return json.loads(text.strip().lower() if kind == "boolean" else text)
    except (ValueError, RecursionError):
        return text
