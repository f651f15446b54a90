"""What a value may be: ranges of numbers, outside of which nothing is serious, paths, texts, lists.

Owns the limits, the ranges that are usual, and the types of the sections that carry them. Must not
know any section or any key.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin


def in_short(number: float | None) -> str:
    """A number as one writes it by hand: 1e6, 0.5, 4294967295."""
    text = f"{number or 0:g}"
    text = text if float(text) == number else f"{number:.10g}"
    return text.replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")


@dataclass(frozen=True)
class Bound:
    """An interval that a number must lie in, or a few numbers besides; None leaves a side open.

    The limits are such that no serious use crosses them.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    also: tuple[float, ...] = ()
    """numbers outside that mean something: -1 = off"""
    usual: tuple[float, float] | None = None
    """first and last number of the range outside of which there is a warning"""

    def __str__(self) -> str:
        names = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
        limits = ((text, getattr(self, name)) for name, text in names.items())
        interval = " and ".join(f"{text} {in_short(x)}" for text, x in limits if x is not None)
        return "must be " + ", or ".join([*map(in_short, self.also), interval])

    def in_short(self) -> str:
        """The interval as ppo.yaml shows it; what `also` means is said by the key's docstring."""
        low = f"above {in_short(self.gt)}" if self.ge is None else in_short(self.ge)
        high = f"below {in_short(self.lt)}" if self.le is None else in_short(self.le)
        between = ", " if self.ge is None and self.le is None else " to "
        return low + between + high + (f", {self.usual_in_short()}" if self.usual else "")

    def usual_in_short(self) -> str:
        """The usual range in words, as far as it is narrower than the bounds."""
        assert self.usual is not None
        first, last = map(in_short, self.usual)
        if self.usual[0] in (self.ge, self.gt):
            return f"usually up to {last}"
        if self.usual[1] in (self.le, self.lt):
            return f"usually from {first}"
        return f"usually {first} to {last}"

    def concerns(self, value: Any) -> bool:
        """Whether it is a number."""
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    def holds(self, number: float) -> bool:
        """True inside the interval; NaN is inside none."""
        return number in self.also or (
            number == number
            and (self.ge is None or number >= self.ge)
            and (self.gt is None or number > self.gt)
            and (self.le is None or number <= self.le)
            and (self.lt is None or number < self.lt)
        )

    def is_usual(self, number: float) -> bool:
        """True where nobody wonders."""
        low, high = self.usual or (number, number)
        return number in self.also or low <= number <= high


@dataclass(frozen=True)
class PathRule:
    """What every file system takes as a path."""

    most_bytes: int = 4095
    most_of_a_name: int = 255

    def __str__(self) -> str:
        return (
            f"must be a path: one line of 1 to {self.most_bytes} bytes, "
            f"at most {self.most_of_a_name} between slashes"
        )

    def concerns(self, value: Any) -> bool:
        """Whether it is a text."""
        return isinstance(value, str)

    def holds(self, text: str) -> bool:
        """True where looking for the file cannot fail but by its absence."""
        names = [os.fsencode(name) for name in text.split("/")]
        length = sum(map(len, names)) + len(names) - 1
        return (
            0 < length <= self.most_bytes
            and not text.isspace()
            and max(map(len, names)) <= self.most_of_a_name
            and not any(ord(letter) < 32 for letter in text)
        )


@dataclass(frozen=True)
class TextRule:
    """What a text must look like."""

    words: str
    pattern: str

    def __str__(self) -> str:
        return f"must be {self.words}"

    def concerns(self, value: Any) -> bool:
        """Whether it is a text."""
        return isinstance(value, str)

    def holds(self, text: str) -> bool:
        """True where all of the text is as the pattern says."""
        return re.fullmatch(self.pattern, text, re.DOTALL) is not None


@dataclass(frozen=True)
class ListRule:
    """Of a list of choices: each at most once."""

    least: int = 0

    def __str__(self) -> str:
        return "must name each only once" + ", and at least one" * (self.least > 0)

    def concerns(self, value: Any) -> bool:
        """Whether it is a list."""
        return isinstance(value, list)

    def holds(self, items: list[Any]) -> bool:
        """True where the list is long enough and nothing stands in it twice."""
        return len(items) >= self.least and len(set(items)) == len(items)


Rule = Bound | PathRule | TextRule | ListRule
HUGE = 10**9

PositiveInt = Annotated[int, Bound(ge=1, le=HUGE)]
NonNegativeInt = Annotated[int, Bound(ge=0, le=HUGE)]
Positive = Annotated[float, Bound(ge=1 / HUGE, le=HUGE)]
NonNegative = Annotated[float, Bound(ge=0, le=HUGE)]
Share = Annotated[float, Bound(ge=1e-6, le=1)]
UnitInterval = Annotated[float, Bound(ge=0, le=1)]
Seed = Annotated[int, Bound(ge=0, le=2**32 - 1)]
"""what torch, numpy and SGLang all take"""
IntOrOff = Annotated[int, Bound(ge=1, le=HUGE, also=(-1,))]
"""-1 switches the thing off"""
Prompts = Annotated[int, Bound(ge=1, le=10**6)]
"""a number of prompts or sequences of one iteration"""
Length = Annotated[int, Bound(ge=1, le=10**7)]
"""tokens of one sequence"""
TokenBudget = Annotated[int, Bound(ge=1, le=10**8)]
"""tokens of one pass of a rank"""
FollowingBudget = Annotated[int, Bound(ge=1, le=HUGE)]
"""such a budget that is twice another one, or that again"""
Ranks = Annotated[int, Bound(ge=1, le=1024)]
"""a degree of parallelism"""
Samples = Annotated[int, Bound(ge=1, le=10_000, usual=(1, 256))]
"""responses to one prompt"""
Weight = Annotated[float, Bound(ge=-1e6, le=1e6)]
"""of one score in a sum of scores"""
StepsOrEnd = Annotated[int, Bound(ge=1, le=HUGE, also=(-1, 0))]
"""iterations between two of something; 0 = only at the end, -1 = never"""
Temperature = Annotated[float, Bound(ge=0.01, le=100, also=(0,), usual=(0.1, 2))]
TopP = Annotated[float, Bound(ge=1e-6, le=1, usual=(0.1, 1))]
Coefficient = Annotated[float, Bound(ge=0, le=1000, usual=(0, 1))]
"""weight of a KL term"""
Seconds = Annotated[float, Bound(ge=0.01, le=HUGE)]
Timeout = Annotated[float, Bound(ge=0.01, le=1e6, usual=(10, 1e6))]
"""seconds, after which something is given up"""
HangTimeout = Annotated[float, Bound(ge=1, le=1e6, also=(0,), usual=(60, 1e5))]
"""seconds; 0 = off"""
FilePath = Annotated[str, PathRule()]
NonEmpty = Annotated[str, TextRule("a text that is not empty", r".+")]
"""perhaps white space"""
Text = Annotated[str, TextRule("a text with a word in it", r".*\S.*")]
MetricName = Annotated[
    str, TextRule("the name of a metric, behind a minus if lower is better", r"-?[A-Za-z].*")
]
PythonName = Annotated[str, TextRule("a Python name", r"[^\W\d]\w*")]
JinjaText = Annotated[
    str, TextRule("a Jinja template, the text itself: {{ messages[0].content }}", r".*\{[{%].*")
]


def bare(hint: Any) -> Any:
    """The annotation without its marks: a type, a union, a Literal."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def broken_rule(hint: Any, value: Any) -> Rule | None:
    """The rule in the annotation that the value, or one of the listed values, breaks."""
    values = [value, *value] if isinstance(value, list) else [value]
    return next(
        (
            rule
            for rule in rules(hint)
            if not all(rule.holds(item) for item in values if rule.concerns(item))
        ),
        None,
    )


def home_expanded(hint: Any, value: Any) -> Any:
    """A path, or listed paths, with the home folder in the place of a leading ~; else the value."""
    if not any(isinstance(rule, PathRule) for rule in rules(hint)):
        return value
    if isinstance(value, list):
        return [os.path.expanduser(path) for path in value]
    return os.path.expanduser(value) if isinstance(value, str) else value


def unusual(hint: Any, value: Any) -> Bound | None:
    """The bound in the annotation whose usual range the value, or a listed value, is outside of."""
    values = value if isinstance(value, list) else [value]
    return next(
        (
            rule
            for rule in rules(hint)
            if isinstance(rule, Bound)
            and not all(rule.is_usual(item) for item in values if rule.concerns(item))
        ),
        None,
    )


@cache
def rules(hint: Any) -> list[Rule]:
    """The rules anywhere inside an annotation."""
    return [mark for mark in marks(hint) if isinstance(mark, Rule)]


def marks(hint: Any) -> list[Any]:
    """What stands beside the types of an annotation: in Annotated[...], in unions, in lists."""
    inner = get_args(hint)[:1] if get_origin(hint) is Annotated else get_args(hint)
    return [*getattr(hint, "__metadata__", ()), *(mark for part in inner for mark in marks(part))]
