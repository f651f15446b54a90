"""Runs an engine's work to its end, as Run.drive does, without a run."""

from collections.abc import Generator
from typing import TypeVar

from ppo.engines.contract import Completion, Completions

Result = TypeVar("Result")


def drive(work: Generator[object, None, Result]) -> Result:
    """What the work returns."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def each(completions: Completions) -> list[Completion]:
    """One object a completion, with lists."""
    parts = zip(completions.borders(), completions.finish_reasons, strict=True)
    return [
        Completion(
            completions.ids[start:end].tolist(), completions.logprobs[start:end].tolist(), reason
        )
        for (start, end), reason in parts
    ]
