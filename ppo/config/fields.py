"""What a configuration section is made of: bounds, derived defaults, and errors that list it all.

Owns the vocabulary in which the sections are written. Must not know any section or any key.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

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

    def __str__(self) -> str:
        given = "" if self.value is None else f" = {self.value!r}"
        head = f"{self.path}{given}: {self.rule}" if self.path else self.rule
        return f"{head}; {self.fix}" if self.fix else head


class ConfigError(InputError):
    """Every problem of a configuration at once. `problems` holds one readable line for each."""

    def __init__(self, problems: list[Problem]) -> None:
        self.found = problems
        self.problems = [str(problem) for problem in problems]
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__("\n  ".join([f"configuration: {count}", *self.problems]))


@dataclass(frozen=True)
class Bound:
    """An interval that a number must lie in; None leaves that side open."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def __str__(self) -> str:
        names = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
        limits = ((text, getattr(self, name)) for name, text in names.items())
        return "must be " + " and ".join(f"{text} {x:.10g}" for text, x in limits if x is not None)

    def holds(self, number: float) -> bool:
        """True inside the interval; NaN is inside none."""
        return (
            number == number
            and (self.ge is None or number >= self.ge)
            and (self.gt is None or number > self.gt)
            and (self.le is None or number <= self.le)
            and (self.lt is None or number < self.lt)
        )


PositiveInt = Annotated[int, Bound(ge=1)]
NonNegativeInt = Annotated[int, Bound(ge=0)]
Positive = Annotated[float, Bound(gt=0)]
NonNegative = Annotated[float, Bound(ge=0)]
Share = Annotated[float, Bound(gt=0, le=1)]
UnitInterval = Annotated[float, Bound(ge=0, le=1)]
Seed = Annotated[int, Bound(ge=0, le=2**32 - 1)]
"""what torch, numpy and SGLang all take"""
IntOrOff = Annotated[int, Bound(ge=-1)]
"""-1 switches the thing off"""


_T = TypeVar("_T")
_MAY_CHANGE = "may change at a resume"
MayChange = Annotated[_T, _MAY_CHANGE]
"""`MayChange[int]`: a resumed run may have another value than before, or other values in the whole
section. Whatever changes neither samples nor gradients is marked so; a change of any other key is
refused."""


def may_change(hint: Any) -> bool:
    """Whether the annotation is marked with `MayChange`."""
    return _MAY_CHANGE in getattr(hint, "__metadata__", ())


def bare(hint: Any) -> Any:
    """The annotation without its marks: a type, a union, a Literal."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


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


class Section:
    """Base of all sections: checks each number against the bounds in its annotation."""

    def __post_init__(self) -> None:
        problems = [
            Problem(name, getattr(self, name), str(bound))
            for name, hint in get_type_hints(type(self), include_extras=True).items()
            if (bound := out_of_bounds(hint, getattr(self, name))) is not None
        ]
        if problems:
            raise ConfigError(problems)


def out_of_bounds(hint: Any, value: Any) -> Bound | None:
    """The bound in the annotation that the number, or one of the listed numbers, breaks."""
    numbers = [x for x in (value if isinstance(value, list) else [value]) if _is_number(x)]
    broken = (bound for bound in _bounds(hint) if not all(map(bound.holds, numbers)))
    return next(broken, None)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _bounds(hint: Any) -> list[Bound]:
    """The bounds anywhere inside an annotation: Annotated[...], unions and lists of it."""
    own = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Bound)]
    inner = get_args(hint)[:1] if get_origin(hint) is Annotated else get_args(hint)
    return own + [bound for part in inner for bound in _bounds(part)]
