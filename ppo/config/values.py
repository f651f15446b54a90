"""Values of the annotated types, from text: what `1e3`, `on`, `null` or `[a, b]` mean for a key.

Must not know any key, nor how YAML is parsed.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from ppo.config.bounds import bare, broken_rule, home_expanded
from ppo.config.fields import ConfigError, Section, hints, short
from ppo.config.text import NUMBER, Plain

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = frozenset({"true", "on", "yes"})
_FALSE = frozenset({"false", "off", "no"})
_INT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_DURATION = re.compile(r"(?:(\d{1,6})-)?(\d{1,6}):([0-5]?\d):([0-5]?\d)")


class Mismatch(ValueError):
    """A text that its type does not admit: what would be right, and perhaps what was meant."""

    def __init__(self, rule: str, fix: str = "", at: str = "", value: Any = None) -> None:
        """at: of a mapping, the dotted key inside that is meant; value: what stands there."""
        super().__init__(rule)
        self.rule, self.fix, self.at, self.value = rule, fix, at, value

    def inside(self, name: str, value: Any) -> Mismatch:
        """The same, seen from the mapping that has it under this name."""
        if self.at:
            return Mismatch(self.rule, self.fix, f"{name}.{self.at}", self.value)
        return Mismatch(self.rule, self.fix, name, value)


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
    if not _is_number(raw):
        return str(raw)
    return _coerce_int(raw) if _INT.fullmatch(raw) else _coerce_float(raw)


def _is_text(raw: str) -> bool:
    """Whether YAML 1.2 reads it as neither number, true, false nor null."""
    return not _is_number(raw) and raw not in _NULL and raw not in ("true", "false")


def _is_number(raw: str) -> bool:
    """Whether YAML 1.2 reads it as one, with any leading zeros but those of 010."""
    is_one = _INT.fullmatch(raw) or NUMBER.fullmatch(raw)
    return is_one is not None and not _LEADING_ZERO.fullmatch(raw)


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
        return _coerce_list(raw, get_args(hint)[0])
    if origin is dict:
        if isinstance(raw, dict):
            return _coerce_mapping(raw, get_args(hint)[1])
        raise Mismatch("must be a mapping {key: value}")
    if isinstance(hint, type) and issubclass(hint, Section):
        return _coerce_section(raw, hint)
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
    if isinstance(hint, type) and issubclass(hint, Section):
        return "a mapping {key: value}"
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


def _coerce_list(raw: Any, hint: Any) -> list[Any]:
    """A list of values, or one value instead of it."""
    items = raw if isinstance(raw, list) else [raw]
    for item in items:
        if bare(hint) is str and isinstance(item, Plain) and not _is_text(item):
            raise Mismatch("must be a list of text", f"put {short(item)} in quotes")
    return [coerce(item, hint) for item in items]


def _coerce_mapping(raw: dict[Any, Any], hint: Any) -> dict[Any, Any]:
    """Names of the user's, each with a value of one type: anything, numbers, small sections."""
    return generic(raw) if hint is Any else {str(n): _coerce_entry(n, raw[n], hint) for n in raw}


def _coerce_entry(name: Any, raw: Any, hint: Any) -> Any:
    try:
        value = coerce(raw, hint)
        rule = broken_rule(hint, value)
        if rule is not None:
            raise Mismatch(str(rule))
    except Mismatch as mismatch:
        raise mismatch.inside(str(name), raw) from None
    return home_expanded(hint, value)


def _coerce_section(raw: Any, section: Any) -> Section:
    """A section that stands in a mapping; its keys have defaults, or are required."""
    types = hints(section)
    if not isinstance(raw, dict):
        raise Mismatch(f"must be a mapping with {', '.join(types)}")
    for name in raw.keys() - types.keys():
        near = difflib.get_close_matches(str(name), types, n=1)
        fix = f"did you mean {near[0]}?" if near else f"its keys are {', '.join(types)}"
        raise Mismatch("unknown key", fix, str(name), raw[name])
    values = {name: _coerce_entry(name, raw[name], types[name]) for name in types if name in raw}
    try:
        return section(**values)
    except TypeError:
        missing = [f.name for f in dataclasses.fields(section) if _is_required(f, values)]
        raise Mismatch("is required", at=missing[0]) from None
    except ConfigError as error:
        problem = error.found[0]
        raise Mismatch(problem.rule, problem.fix, problem.path, problem.value) from None


def _is_required(field: dataclasses.Field, given: dict[str, Any]) -> bool:
    defaults = (field.default, field.default_factory)
    return field.name not in given and all(d is dataclasses.MISSING for d in defaults)


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
    if not _is_number(raw) or not (_INT.fullmatch(raw) or float(raw) % 1 == 0) or _vanishes(raw):
        raise Mismatch("must be a whole number")
    if abs(float(raw)) >= 2**63:
        raise Mismatch("must be a whole number of at most 19 digits")
    return int(raw) if _INT.fullmatch(raw) else int(float(raw))


def _coerce_float(raw: str) -> float:
    if _LEADING_ZERO.fullmatch(raw):
        raise Mismatch("must be a number", "write it without the leading zero")
    if not _is_number(raw):
        raise Mismatch("must be a number")
    if not math.isfinite(float(raw)):
        raise Mismatch("must be a number below 1.8e308")
    if _vanishes(raw):
        raise Mismatch("must be 0, or a number of at least 1e-308")
    return float(raw)


def _vanishes(raw: str) -> bool:
    """Whether a number that is not 0 would be read as 0."""
    return float(raw) == 0 and re.search("[1-9]", raw.lower().partition("e")[0]) is not None


_SCALARS = {bool: _coerce_bool, int: _coerce_int, float: _coerce_float, str: str}
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}
