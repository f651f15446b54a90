"""Runs an engine's work to its end, as Run.drive does, without a run."""

from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")


def drive(work: Generator[object, None, Result]) -> Result:
    """What the work returns."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value
