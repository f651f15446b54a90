"""The keys of `Config` as a flat table of dotted paths, and a configuration as such a table.

Owns where a key that is not given gets its value from. Must not know how files are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from ppo.config.bounds import bare
from ppo.config.fields import Derive, Section, hints, may_change
from ppo.config.root import Config


class Key(NamedTuple):
    """One leaf of the configuration."""

    hint: Any
    """annotated type"""
    required: bool
    default: Any
    """value when nothing is given and nothing derived"""
    derive: Derive | None
    """where the value comes from when the key is null or absent; None = the default"""
    is_duration: bool
    may_change: bool
    """a resumed run may have another value than before"""
    is_inherited: bool
    """of a section that follows another one key by key"""


@cache
def schema() -> dict[str, Key]:
    """Every key by its dotted path, in the order of the sections."""
    return dict(_walk(Config, "", _Above()))


@cache
def section_paths() -> frozenset[str]:
    """The dotted paths that are sections."""
    parts = [path.split(".") for path in schema()]
    return frozenset(".".join(path[:length]) for path in parts for length in range(1, len(path)))


def flatten(config: Config) -> dict[str, Any]:
    """The values of a configuration by dotted path."""
    return {path: _value_at(config, path) for path in schema()}


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """The configuration with other values; keys that follow these keep theirs."""
    return build(Config, nest({**flatten(config), **values}))


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """The inverse of dotted paths: nested mappings."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *sections, leaf = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    return tree


def build(cls: type, tree: dict[str, Any]) -> Any:
    """A section (or the whole configuration) from nested mappings of right values."""
    types = hints(cls)
    values = {
        field.name: build(bare(types[field.name]), tree[field.name])
        if is_section(types[field.name])
        else tree[field.name]
        for field in dataclasses.fields(cls)
    }
    return cls(**values)


class _Above(NamedTuple):
    """What the sections around a key say about it."""

    inherit: str | None = None
    """path of the section that theirs follows"""
    own: Mapping[str, Any] = MappingProxyType({})
    """defaults of theirs that do not follow"""
    may_change: bool = False


def _walk(cls: type, prefix: str, above: _Above) -> Iterator[tuple[str, Key]]:
    for field in dataclasses.fields(cls):
        path, hint = prefix + field.name, hints(cls)[field.name]
        if is_section(hint):
            meta = field.metadata
            inherit = f"{above.inherit}.{field.name}" if above.inherit else meta.get("inherit")
            below = _Above(inherit, meta.get("own", {}), above.may_change or may_change(hint))
            yield from _walk(bare(hint), path + ".", below)
        else:
            yield path, _key(field, hint, above)


def _key(field: dataclasses.Field, hint: Any, above: _Above) -> Key:
    derive = field.metadata.get("derive")
    default = field.default if field.default_factory is MISSING else field.default_factory()
    is_inherited = above.inherit is not None and field.name not in above.own
    if field.name in above.own:
        default = above.own[field.name]
    elif above.inherit:
        derive = Derive((f"{above.inherit}.{field.name}",), 1)
    return Key(
        hint=hint,
        required=default is MISSING,
        default=default,
        derive=derive,
        is_duration=field.metadata.get("duration", False),
        may_change=above.may_change or may_change(hint),
        is_inherited=is_inherited,
    )


def is_section(hint: Any) -> bool:
    """Whether the annotation of a field is a section of its own."""
    return isinstance(bare(hint), type) and issubclass(bare(hint), Section)


def _value_at(config: Config, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value
