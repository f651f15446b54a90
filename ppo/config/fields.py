"""What a configuration section is made of: marks, derived defaults, and errors that list it all.

Owns the vocabulary in which the sections are written. Must not know any section or any key.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

from ppo.config.bounds import broken_rule, marks
from ppo.errors import InputError


class Problem(NamedTuple):
    """One thing that is wrong with a configuration, and what to do about it."""

    path: str
    """dotted path of the key, empty when the problem has no key"""
    value: Any
    """what was given; None = nothing"""
    rule: str
    """what would be right"""
    fix: str = ""
    """what to change; empty when the rule says it all"""
    is_listed: bool = False
    """spelt out however many problems there are"""

    def __str__(self) -> str:
        given = "" if self.value is None else f" = {short(repr(self.value))}"
        path = self.path if self.path.isprintable() else repr(self.path)
        head = f"{short(path)}{given}: {self.rule}" if path else self.rule
        return f"{head}; {self.fix}" if self.fix else head


MOST_SHOWN = 20
"""problems that the message of one ConfigError spells out"""


def short(text: str, most: int = 200) -> str:
    """A text without its middle where it is long."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 4 :]}"


class ConfigError(InputError):
    """Every problem of a configuration at once. `problems` holds one readable line for each."""

    def __init__(self, problems: list[Problem]) -> None:
        self.found = problems
        self.problems = [str(problem) for problem in problems]
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        left, lines = MOST_SHOWN, [f"configuration: {count}"]
        for problem, line in zip(problems, self.problems, strict=True):
            if problem.is_listed or left > 0:
                lines.append(line)
                left -= not problem.is_listed
        if len(problems) >= len(lines):
            lines.append(f"and {len(problems) - len(lines) + 1} more")
        super().__init__("\n  ".join(lines))


_T = TypeVar("_T")
_MAY_CHANGE = "may change at a resume"
MayChange = Annotated[_T, _MAY_CHANGE]
"""`MayChange[int]`: a resumed run may have another value than before, or other values in the whole
section. Whatever changes neither samples nor gradients is marked so; a change of any other key is
refused."""


def may_change(hint: Any) -> bool:
    """Whether the annotation is marked with `MayChange`, as a whole or in a part."""
    return _MAY_CHANGE in marks(hint)


class Derive(NamedTuple):
    """The value of a key that was not given: the sum of other keys, times a factor."""

    paths: tuple[str, ...]
    times: int


def derived(*paths: str, times: int = 1) -> Any:
    """A key whose null means the value of other keys: `times` x their sum (one path: as it is).

    The loader fills it in, so that a loaded configuration never holds None there.
    """
    return dataclasses.field(default=None, metadata={"derive": Derive(paths, times)})


def inherits(section: type, path: str, **own: Any) -> Any:
    """A nested section whose keys default to those of the section at `path`, but for `own`."""
    return dataclasses.field(
        default_factory=lambda: section(**own), metadata={"inherit": path, "own": own}
    )


def seconds() -> dict[str, Any]:
    """Metadata of a duration: seconds, or text as [D-]HH:MM:SS."""
    return {"duration": True}


@cache
def hints(section: type) -> dict[str, Any]:
    """The annotations of a section's fields, marks included."""
    return get_type_hints(section, include_extras=True)


class Section:
    """Base of all sections: checks each value against the rules in its annotation."""

    def __post_init__(self) -> None:
        problems = [
            Problem(name, getattr(self, name), str(rule))
            for name, hint in hints(type(self)).items()
            if (rule := broken_rule(hint, getattr(self, name))) is not None
        ]
        if problems:
            raise ConfigError(problems)
