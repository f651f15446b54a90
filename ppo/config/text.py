"""YAML whose scalars stay text: a value is read by the type of its key, in ppo/config/values.py.

PyYAML guesses types by itself: `1e-5` is text to it, `on` a bool, `010` eight, `12:30:45` a number.
Owns what of YAML is read, and how much. Must not know any key.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import yaml

NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


class Plain(str):
    """An unquoted scalar."""


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
MANY_BRACKETS = 1000
"""inside each other they take PyYAML's own parser seconds"""


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
    """Quotes text that would be read as a number; writes equal lists out twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(f"^(?:{NUMBER.pattern})$"), list("-+.0123456789")
)


def parse(text: str) -> Any:
    """Mappings, lists and text (`Plain` if unquoted). Raises yaml.YAMLError with the line.

    Aliases are followed, but not beyond MOST_NODES: ten short lines can stand for gigabytes.
    """
    try:
        is_quick = len(text) < _SHORT and text.count("[") + text.count("{") < MANY_BRACKETS
        loader = (_LOADER if is_quick else _FAST_LOADER)(text)
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


def inline(value: Any) -> str:
    """The same of one value, in one line; numbers as one writes them by hand."""
    if isinstance(value, float):
        return repr(value).replace("e-0", "e-").replace("e+0", "e+")
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=1e9)
    return text.removesuffix("\n").removesuffix("\n...")
