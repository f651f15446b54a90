"""YAML whose scalars stay text until the annotated type of their key says what they are.

PyYAML guesses types by itself: `1e-5` is text to it, `on` a bool, `010` eight, `12:30:45` a number.
Here a scalar is read by the type of its key. Must not know any key.
"""

from __future__ import annotations

import difflib
import math
import re
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = frozenset({"true", "on", "yes"})
_FALSE = frozenset({"false", "off", "no"})
_INT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*")
_FLOAT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_DURATION = re.compile(r"(?:(\d+)-)?(\d+):([0-5]?\d):([0-5]?\d)")


class Plain(str):
    """An unquoted scalar."""


class Mismatch(ValueError):
    """A text that its type does not admit: what would be right, and perhaps what was meant."""

    def __init__(self, rule: str, fix: str = "") -> None:
        super().__init__(rule)
        self.rule, self.fix = rule, fix


class _TextLoader(yaml.SafeLoader):
    """Builds mappings, sequences and text; complains about a key that stands twice."""

    yaml_implicit_resolvers = {  # noqa: RUF012  `<<` is all that is left of them
        "<": [("tag:yaml.org,2002:merge", re.compile("<<"))]
    }


def _construct_scalar(loader: _TextLoader, node: yaml.ScalarNode) -> str:
    return node.value if node.style else Plain(node.value)


def _construct_mapping(loader: _TextLoader, node: yaml.MappingNode) -> dict[str, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if key.value in seen and key.value != "<<":
            raise yaml.constructor.ConstructorError(
                None, None, f"key {key.value!r} stands twice", key.start_mark
            )
        seen.add(key.value)
    loader.flatten_mapping(node)
    return {str(key.value): loader.construct_object(value, deep=True) for key, value in node.value}


_TextLoader.add_constructor("tag:yaml.org,2002:str", _construct_scalar)
_TextLoader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


class _Dumper(yaml.SafeDumper):
    """Quotes text that `generic` would read as a number; writes equal lists out twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(f"^(?:{_FLOAT.pattern})$"), list("-+.0123456789")
)


def parse(text: str) -> Any:
    """Mappings, lists and text (`Plain` if unquoted). Raises yaml.YAMLError with the line."""
    return yaml.load(text, Loader=_TextLoader)


def dump(tree: dict[str, Any]) -> str:
    """YAML text of plain values; `parse` and `coerce` give the same values back."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def is_null(raw: Any) -> bool:
    """Whether a parsed value is null: absent, empty, `null` or `~`, unquoted."""
    return raw is None or (isinstance(raw, Plain) and raw in _NULL)


def generic(raw: Any) -> Any:
    """Values of a free-form section (kwargs): numbers, true/false and null as YAML 1.2 has them."""
    if isinstance(raw, dict):
        return {key: generic(value) for key, value in raw.items()}
    if isinstance(raw, list):
        return [generic(value) for value in raw]
    if not isinstance(raw, Plain):
        return raw
    if raw in _NULL:
        return None
    if raw in ("true", "false"):
        return raw == "true"
    if _INT.fullmatch(raw) and not _LEADING_ZERO.fullmatch(raw):
        return int(raw)
    return float(raw) if _FLOAT.fullmatch(raw) and not _LEADING_ZERO.fullmatch(raw) else str(raw)


def duration(raw: Any) -> Any:
    """Seconds for [D-]HH:MM:SS; anything else unchanged."""
    match = _DURATION.fullmatch(raw) if isinstance(raw, str) else None
    if match is None:
        return raw
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return Plain(str(((days * 24 + hours) * 60 + minutes) * 60 + seconds))


def coerce(raw: Any, hint: Any) -> Any:
    """`raw` (from `parse`) as a value of the annotated type. Raises Mismatch."""
    origin = get_origin(hint)
    if origin is Annotated:
        return coerce(raw, get_args(hint)[0])
    if origin in (Union, types.UnionType):
        return _coerce_union(raw, get_args(hint))
    if is_null(raw):
        raise Mismatch(f"must be {describe(hint)}, null is not allowed")
    if origin is list:
        items = raw if isinstance(raw, list) else [raw]
        return [coerce(item, get_args(hint)[0]) for item in items]
    if origin is dict:
        if isinstance(raw, dict):
            return generic(raw)
        raise Mismatch("must be a mapping {key: value}")
    if not isinstance(raw, str):
        raise Mismatch(f"must be {describe(hint)}")
    if origin is Literal:
        return _coerce_choice(raw, get_args(hint))
    return _SCALARS[hint](raw)


def describe(hint: Any) -> str:
    """An annotated type in words."""
    origin, args = get_origin(hint), list(get_args(hint))
    if origin is Annotated:
        return describe(args[0])
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe, args))
    if origin is Literal:
        return "one of " * (len(args) > 1) + ", ".join(map(str, args))
    if origin is list:
        return f"a list of {describe(args[0])}"
    if origin is dict:
        return "a mapping {key: value}"
    return _WORDS[hint]


def _coerce_union(raw: Any, members: tuple[Any, ...]) -> Any:
    if type(None) in members and is_null(raw):
        return None
    real = [member for member in members if member is not type(None)]
    if len(real) == 1:
        return coerce(raw, real[0])
    for member in real:
        try:
            return coerce(raw, member)
        except Mismatch:
            continue
    raise Mismatch(f"must be {' or '.join(describe(member) for member in members)}")


def _coerce_choice(raw: str, choices: tuple[str, ...]) -> str:
    if raw in choices:
        return str(raw)
    near = difflib.get_close_matches(raw, choices, n=1)
    fix = f"did you mean {near[0]}?" if near else ""
    raise Mismatch(f"must be {describe(Literal[choices])}", fix)


def _coerce_bool(raw: str) -> bool:
    if raw.lower() in _TRUE | _FALSE:
        return raw.lower() in _TRUE
    raise Mismatch("must be true or false")


def _coerce_int(raw: str) -> int:
    if _LEADING_ZERO.fullmatch(raw):
        raise Mismatch("must be a whole number", "write it without the leading zero")
    if _INT.fullmatch(raw):
        return int(raw)
    if _FLOAT.fullmatch(raw) and float(raw).is_integer():
        return int(float(raw))
    raise Mismatch("must be a whole number")


def _coerce_float(raw: str) -> float:
    if _LEADING_ZERO.fullmatch(raw):
        raise Mismatch("must be a number", "write it without the leading zero")
    if not (_FLOAT.fullmatch(raw) or _INT.fullmatch(raw)) or not math.isfinite(float(raw)):
        raise Mismatch("must be a number")
    return float(raw)


_SCALARS = {bool: _coerce_bool, int: _coerce_int, float: _coerce_float, str: str}
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}
