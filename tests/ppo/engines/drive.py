"""Runs an engine's work to its end, as Run.drive does, without a run."""

from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from ppo.engines.contract import Completion, Completions, Engine, Request, SamplingParams

Result = TypeVar("Result")


def drive(work: Generator[object, None, Result]) -> Result:
    """What the work returns."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


class Listed(NamedTuple):
    """A completion with lists."""

    response_ids: list[int]
    logprobs: list[float]
    finish_reason: str


class Generated(NamedTuple):
    """Of the requests that this rank was told of, in their order."""

    completions: list[Listed]
    metrics: dict[str, float]


def generate(
    engine: Engine, requests: Sequence[Request], params: SamplingParams, *, at_once: int = 10**9
) -> Generator[None, None, Generated]:
    """All requests by one engine; completions have lists. A rank that is told nothing gets none.

    at_once: requests that are submitted together, as soon as there is room for one.
    """
    longest = max((len(request.prompt_ids) for request in requests), default=0)
    generation = engine.begin(params, longest_prompt=longest, most=len(requests))
    told: dict[int, Completion] = {}
    waiting, unfinished = list(requests), 0
    is_told = engine.generates_together or getattr(engine, "is_leader", True)
    try:
        while waiting or (unfinished and is_told):
            if waiting and (generation.room or not unfinished):
                now, waiting = waiting[:at_once], waiting[at_once:]
                generation.submit(now)
                unfinished += len(now)
            ended = generation.advance()
            told |= dict(ended)
            unfinished -= len(ended)
            yield
        metrics = generation.metrics()
    finally:
        generation.close()
    return Generated([listed(told[r.uid]) for r in requests if r.uid in told], metrics)


def listed(completion: Completion) -> Listed:
    """With lists in place of arrays."""
    return Listed(
        np.asarray(completion.response_ids).tolist(),
        np.asarray(completion.logprobs).tolist(),
        completion.finish_reason,
    )


def each(completions: Completions) -> list[Listed]:
    """One object a completion."""
    parts = zip(completions.borders(), completions.finish_reasons, strict=True)
    return [
        Listed(
            completions.ids[start:end].tolist(), completions.logprobs[start:end].tolist(), reason
        )
        for (start, end), reason in parts
    ]
