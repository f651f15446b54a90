"""YAML whose scalars stay text until the annotated type of their key says what they are.

PyYAML guesses types by itself: `1e-5` is text to it, `on` a bool, `010` eight, `12:30:45` a number.
Here a scalar is read by the type of its key. Must not know any key.
"""

from __future__ import annotations

import difflib
import math
import re
import types
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml

from ppo.config.bounds import bare
from ppo.config.fields import short

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = frozenset({"true", "on", "yes"})
_FALSE = frozenset({"false", "off", "no"})
_INT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*")
_FLOAT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_DURATION = re.compile(r"(?:(\d{1,6})-)?(\d{1,6}):([0-5]?\d):([0-5]?\d)")


class Plain(str):
    """An unquoted scalar."""


class Mismatch(ValueError):
    """A text that its type does not admit: what would be right, and perhaps what was meant."""

    def __init__(self, rule: str, fix: str = "") -> None:
        super().__init__(rule)
        self.rule, self.fix = rule, fix


MOST_DEPTH = 50
MOST_NODES = 200_000
"""mappings, lists and texts that a YAML text may hold, with what its aliases stand for"""


def _construct_scalar(loader: Any, node: yaml.ScalarNode) -> str:
    return node.value if node.style else Plain(node.value)


def _construct_sequence(loader: Any, node: yaml.SequenceNode) -> list[Any]:
    return [loader.construct_object(item, deep=True) for item in node.value]


def _construct_mapping(loader: Any, node: yaml.MappingNode) -> dict[str, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _error("a key must be a text, not a list or a mapping", key)
        if key.value in seen and key.value != "<<":
            raise _error(f"key {key.value!r} stands twice", key)
        seen.add(key.value)
    loader.flatten_mapping(node)
    return {str(key.value): loader.construct_object(value, deep=True) for key, value in node.value}


def _refuse_tag(loader: Any, node: yaml.Node) -> None:
    raise _error(f"tags such as {node.tag!r} have no meaning here", node)


def _error(message: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, message, node.start_mark)


def _text_loader(base: Any) -> Any:
    """The loader that builds mappings, lists and text, and nothing else."""

    class TextLoader(base):
        yaml_implicit_resolvers = {  # noqa: RUF012  `<<` is all that is left of them
            "<": [("tag:yaml.org,2002:merge", re.compile("<<"))]
        }
        yaml_constructors = {  # noqa: RUF012
            "tag:yaml.org,2002:str": _construct_scalar,
            "tag:yaml.org,2002:seq": _construct_sequence,
            "tag:yaml.org,2002:map": _construct_mapping,
            None: _refuse_tag,
        }

    return TextLoader


_LOADER = _text_loader(yaml.SafeLoader)
# libyaml reads ten times as fast, but takes the colon of {a:} for a part of the name
_FAST_LOADER = _text_loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader))
_SHORT = 1 << 16
"""characters up to which speed does not matter"""


class _Size(NamedTuple):
    """How much a node stands for, aliases written out."""

    nodes: int
    depth: int


def _measure(node: yaml.Node, known: dict[int, _Size | None]) -> _Size:
    """The size of a node; `known` holds those already measured, None while they are."""
    if id(node) in known:
        size = known[id(node)]
        if size is None:
            raise _error("an alias must not stand inside of what it stands for", node)
        return size
    known[id(node)] = None
    parts = node.value if isinstance(node, yaml.CollectionNode) else []
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    sizes = [_measure(part, known) for part in parts]
    size = _Size(
        1 + sum(part.nodes for part in sizes), 1 + max((part.depth for part in sizes), default=0)
    )
    if size.nodes > MOST_NODES or size.depth > MOST_DEPTH:
        raise _error(
            f"holds more than {MOST_NODES} values, or {MOST_DEPTH} inside each other, with what "
            "its aliases stand for",
            node,
        )
    known[id(node)] = size
    return size


class _Dumper(yaml.SafeDumper):
    """Quotes text that `generic` would read as a number; writes equal lists out twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(f"^(?:{_FLOAT.pattern})$"), list("-+.0123456789")
)


def parse(text: str) -> Any:
    """Mappings, lists and text (`Plain` if unquoted). Raises yaml.YAMLError with the line.

    Aliases are followed, but not beyond MOST_NODES: ten short lines can stand for gigabytes.
    """
    try:
        loader = (_LOADER if len(text) < _SHORT else _FAST_LOADER)(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _measure(node, {})
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError:
        raise yaml.YAMLError(f"holds more than {MOST_DEPTH} values inside each other") from None
    except UnicodeEncodeError as error:  # bytes of a command line that are not UTF-8
        raise yaml.YAMLError(f"is not UTF-8: {error}") from None


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
    if not _is_number(raw):
        return str(raw)
    return _coerce_int(raw) if _INT.fullmatch(raw) else _coerce_float(raw)


def _is_text(raw: str) -> bool:
    """Whether YAML 1.2 reads it as neither number, true, false nor null."""
    return not _is_number(raw) and raw not in _NULL and raw not in ("true", "false")


def _is_number(raw: str) -> bool:
    """Whether YAML 1.2 reads it as one, with any leading zeros but those of 010."""
    is_one = _INT.fullmatch(raw) or _FLOAT.fullmatch(raw)
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


def _coerce_list(raw: Any, hint: Any) -> list[Any]:
    """A list of values, or one value instead of it."""
    items = raw if isinstance(raw, list) else [raw]
    for item in items:
        if bare(hint) is str and isinstance(item, Plain) and not _is_text(item):
            raise Mismatch("must be a list of text", f"put {short(item)} in quotes")
    return [coerce(item, hint) for item in items]


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
    if not _is_number(raw) or not (_INT.fullmatch(raw) or float(raw) % 1 == 0):
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
    return float(raw)


_SCALARS = {bool: _coerce_bool, int: _coerce_int, float: _coerce_float, str: str}
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}
