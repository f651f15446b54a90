"""A translation as YAML, with what it does not hold in comments at its top."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from ppo.config.migrate.translate import Translation
from ppo.config.schema import schema
from ppo.config.text import inline

COLUMNS = 100


def show(found: Translation, trainer: str) -> str:
    """The whole text. Keys stand in the order of configs/ppo.yaml."""
    lines = [
        f"# From {trainer}. What is marked as its default was not said, and is another one here."
    ]
    lines += _block("Look at these, which have no counterpart, or another one", found.gaps)
    if found.missing:
        lines += ["#", "# To be filled in, below or on the command line:"]
        lines += [f"#   {path}" for path in found.missing]
    lines += _block("Not needed here", found.unneeded)
    values = found.values | found.defaults
    section: list[str] = []
    for path in (path for path in schema() if path in values):
        *above, leaf = path.split(".")
        same = 0
        while same < min(len(above), len(section)) and above[same] == section[same]:
            same += 1
        if same == 0:
            lines.append("")
        lines += [f"{'  ' * depth}{above[depth]}:" for depth in range(same, len(above))]
        section = above
        line = f"{'  ' * len(above)}{leaf}: {inline(values[path])}"
        if path in found.defaults:
            line += f"  # {trainer}'s default; {_ours(path)}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _ours(path: str) -> str:
    key = schema()[path]
    if key.is_inherited:
        return "here it follows the actor's"
    return f"ours: {'null' if key.derive else inline(key.default)}"


def _block(title: str, entries: Mapping[str, str]) -> Iterator[str]:
    """A line for each reason, with what it is of."""
    if entries:
        yield "#"
        yield f"# {title}:"
    by_reason: dict[str, list[Any]] = {}
    for key, reason in entries.items():
        by_reason.setdefault(reason, []).append(key)
    for reason, keys in by_reason.items():
        text = f"{', '.join(keys)}: {reason}"
        yield from textwrap.wrap(
            *(text, COLUMNS),
            initial_indent="#   ",
            subsequent_indent="#     ",
            break_long_words=False,
            break_on_hyphens=False,
        )
