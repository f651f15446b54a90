"""The keys of `Config` as a flat table of dotted paths, and a configuration as such a table.

Owns where a key that is not given gets its value from. Must not know how files are read.
"""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING
from functools import cache
from typing import Any, NamedTuple, get_type_hints

from ppo.config.fields import Derive, Section
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


@cache
def schema() -> dict[str, Key]:
    """Every key by its dotted path, in the order of the sections."""
    return dict(_walk(Config, "", None, {}))


@cache
def section_paths() -> frozenset[str]:
    """The dotted paths that are sections."""
    parts = [path.split(".") for path in schema()]
    return frozenset(".".join(path[:length]) for path in parts for length in range(1, len(path)))


def flatten(config: Config) -> dict[str, Any]:
    """The values of a configuration by dotted path."""
    return {path: _value_at(config, path) for path in schema()}


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
    hints = get_type_hints(cls)
    values = {
        field.name: build(hints[field.name], tree[field.name])
        if _is_section(hints[field.name])
        else tree[field.name]
        for field in dataclasses.fields(cls)
    }
    return cls(**values)


def _walk(cls: type, prefix: str, inherit: str | None, own: dict[str, Any]):
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        path, hint = prefix + field.name, hints[field.name]
        if _is_section(hint):
            source = f"{inherit}.{field.name}" if inherit else field.metadata.get("inherit")
            yield from _walk(hint, path + ".", source, field.metadata.get("own", {}))
        else:
            yield path, _key(field, hint, inherit, own)


def _key(field: dataclasses.Field, hint: Any, inherit: str | None, own: dict[str, Any]) -> Key:
    derive = field.metadata.get("derive")
    default = field.default if field.default_factory is MISSING else field.default_factory()
    if field.name in own:
        default = own[field.name]
    elif inherit:
        derive = Derive((f"{inherit}.{field.name}",), 1)
    return Key(
        hint=hint,
        required=default is MISSING,
        default=default,
        derive=derive,
        is_duration=field.metadata.get("duration", False),
    )


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Section)


def _value_at(config: Config, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value
