"""Schemas of tools, against transformers'; text of what tools return."""

from typing import Any, Literal

import pytest

from ppo.episodes.schemas import schema_of
from ppo.episodes.tools import as_text, as_tool


def basic(a: int, b: float = 1.0, c: str = "x", d: bool = True) -> str:
    """Adds some.

    In two lines.

    Args:
        a: the first,
            on two lines
        b: the second
        c: what to do (choices: ["tea", " coffee"])
        d: whether: or not

    Returns:
        What came of it.
    """
    return f"{a}{b}{c}{d}"


def nested(
    a: list[int],
    b: dict[str, list[float]],
    c: Literal["x", "y"],
    d: int | None = None,
    e: int | str | None = None,
    f: list[int] | dict | None = None,
    g: tuple[int, str] = (1, ""),
    h: Any = None,
    i: list | tuple = (),
    j: Literal[1, "a"] = 1,
):
    """
    Much.

    Args:
        a: a
        b: b
        c: c
        d: d

        e: e
        f: f
        g: g
        h: h
        i: i
        j: j
    Raises:
        ValueError: never
    """


class Env:
    def guess(self, word: str) -> str:
        """Guess a word.

        Args:
            word: five letters

        Returns:
            the feedback"""
        return word


def plain() -> None:
    """Does nothing."""


@pytest.mark.parametrize("function", [basic, nested, Env().guess, plain])
def test_a_schema_is_what_transformers_makes_of_the_function(function) -> None:
    from transformers.utils.chat_template_utils import get_json_schema

    assert schema_of(function) == get_json_schema(function)


def test_what_describes_no_tool_is_said_by_name() -> None:
    def silent(a: int) -> None: ...

    def untyped(a):
        """Does."""

    def many(*words: str):
        """Does."""

    def strange(a: set[int]):
        """Does."""

    def unknown(a: "Nothing"):  # noqa: F821  # pyright: ignore
        """Does."""

    for function, says in [
        (silent, "the tool silent has no docstring"),
        (untyped, "the tool untyped: its parameter a has no type"),
        (many, r"the tool many takes \*words"),
        (strange, "the tool strange: parameter a: no schema for"),
        (unknown, "the tool unknown: its types cannot be read"),
    ]:
        with pytest.raises(ValueError, match=says):
            as_tool(function)
    with pytest.raises(ValueError, match=r"needs function\.name"):
        as_tool({"type": "function", "function": {}})
    assert as_tool({"name": "f"}).name == as_tool(as_tool({"name": "f"})).name == "f"


def test_text_of_whatever_a_tool_returns_is_valid() -> None:
    deep: list[Any] = []
    deep.append(deep)
    texts = {"a": "a", b"caf\xc3\xa9\xff": "café\ufffd", None: "", 3: "3", (1, "é"): '[1, "é"]'}
    assert [as_text(value) for value in texts] == list(texts.values())
    assert as_text({"a": [1]}) == '{"a": [1]}' and as_text("\udcff") == "\\udcff"
    assert as_text(deep) == "[[...]]"
