"""Calls of tools in what models say, by format; nothing that a model says is an exception."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo.episodes.contract import ToolFormat
from ppo.episodes.tool_calls import FORMATS, take_apart
from tests.ppo.episodes.shapes import SHAPES

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "number"},
                    "exact": {"type": "boolean"},
                    "note": {"type": "string"},
                    "many": {"type": "array"},
                }
            },
        },
    }
]
SAID: list[tuple[ToolFormat, str, list[tuple[str, dict]], str]] = [
    (
        "hermes",
        'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        [("add", {"a": 1})],
        "I add.",
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>\n'
        '<tool_call>{"name": "sub", "parameters": {"a": 2}}',
        [("add", {"a": 1}), ("sub", {"a": 2})],
        "",
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', [("now", {})], ""),
    (
        "qwen3_xml",
        "Well.<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2.5\n"
        "</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=note>\n17\nlines\n"
        "</parameter>\n<parameter=many>\n[1, 2]\n</parameter>\n</function>\n</tool_call>",
        [("add", {"a": 1, "b": 2.5, "exact": True, "note": "17\nlines", "many": [1, 2]})],
        "Well.",
    ),
    ("llama3", '{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})], ""),
    (
        "llama3",
        'So:<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "add", '
        '"parameters": {"a": 2}}',
        [("add", {"a": 1}), ("add", {"a": 2})],
        "So:",
    ),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}]',
        [("add", {"a": 1}), ("add", {})],
        "",
    ),
    (
        "mistral",
        'Now [TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 2}',
        [("add", {"a": 1}), ("add", {"a": 2})],
        "Now",
    ),
    ("mistral", '[TOOL_CALLS]add{"a": 1}', [("add", {"a": 1})], ""),
]


@pytest.mark.parametrize(("format_", "text", "calls", "rest"), SAID)
def test_calls_are_found(
    format_: ToolFormat, text: str, calls: list[tuple[str, dict]], rest: str
) -> None:
    said = take_apart(text, format_, TOOLS)
    assert [(call.name, call.arguments) for call in said.calls] == calls
    assert [call.error for call in said.calls] == [None] * len(calls)
    assert said.text == rest
    assert {len(call.id) for call in said.calls} == {9}
    assert take_apart(text, format_).calls == []  # without tools nothing is a call


@pytest.mark.parametrize("tools", [(), TOOLS])
def test_a_turn_that_is_cut_in_its_thoughts_has_said_nothing_and_calls_nothing(tools) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    cut = take_apart(f"Well. <think>maybe 42 {call}", "hermes", tools)
    assert cut == ("Well.", f"maybe 42 {call}", [])
    ended = take_apart(f"<think>maybe</think>\n\n{call}", "hermes", TOOLS)
    assert (ended.reasoning, ended.text, len(ended.calls)) == ("maybe", "", 1)


@pytest.mark.parametrize(
    ("format_", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>'),
        ("hermes", "<tool_call>add(1, 2)</tool_call>"),
        ("hermes", '<tool_call>["add"]</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 100_000),
        ("qwen3_xml", '<tool_call>{"name": "add"}</tool_call>'),
        ("llama3", '<|python_tag|>print("hello")'),
        ("llama3", '{"name": "add", "parameters": {'),
        ("mistral", "[TOOL_CALLS]nothing"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{"),
    ],
)
def test_a_malformed_call_is_a_call_that_says_what_is_wrong(format_: ToolFormat, text: str) -> None:
    (call,) = take_apart(text, format_, TOOLS).calls
    assert call.error is not None and call.error.startswith("malformed call of a tool")
    assert len(call.error) < 600


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.text(), st.integers(0, 60), st.text(max_size=5))
def test_whatever_a_model_says_can_be_taken_apart(
    format_: ToolFormat, text: str, at: int, noise: str
) -> None:
    take_apart(text, format_, TOOLS)
    for kind, said, _, _ in SAID:
        if kind == format_:
            take_apart(said[:at] + noise + said[at:], format_, TOOLS)
            take_apart(said[:at], format_, TOOLS)


@pytest.mark.parametrize("format_", FORMATS)
def test_calls_that_never_end_cost_no_more_than_their_length(format_: ToolFormat) -> None:
    """100,000 characters, in a second at most; with the square of them it would be several."""
    start = time.process_time()
    for begun in ("", "<tool_call>", "<tool_call><function=add>", '{"name"', "[TOOL_CALLS]"):
        for part in ("<tool_call>", "<function=", "<parameter=", "[TOOL_CALLS]", "[ARGS]", "{"):
            take_apart(begun + part * (100_000 // len(part)), format_, TOOLS)
    assert time.process_time() - start < 2


def test_reasoning_is_taken_apart() -> None:
    said = take_apart("<think>\nhm\n</think>\n\nYes.", "hermes")
    assert (said.text, said.reasoning) == ("Yes.", "hm")
    said = take_apart("hm</think>Yes.", "hermes")  # the prompt ended with <think>
    assert (said.text, said.reasoning) == ("Yes.", "hm")
    assert take_apart("<think>never done", "hermes") == ("", "never done", [])


def test_every_shape_of_a_template_has_a_format() -> None:
    assert {tool_format for _, _, tool_format in SHAPES.values()} <= set(FORMATS)
