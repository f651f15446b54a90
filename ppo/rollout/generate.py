"""Prompts to completions over all engines: requests are handed out while they generate."""

from collections import Counter, deque
from collections.abc import Generator, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from ppo.data.dataset import Prompt
from ppo.engines.contract import (
    Completion,
    Completions,
    Engine,
    Generation,
    Request,
    SamplingParams,
)
from ppo.metrics import Metrics
from ppo.run.run import Run
from sharding.mesh import Mesh
from sharding.partition import largest_first

UIDS_PER_PROMPT = 2**20
"""Sample numbers that a prompt's uid leaves room for."""
# Replicas get whole prompts, whose samples share a prefix, up to this load over the mean load.
_MAX_IMBALANCE = 1.1


class ScoresToCome(Protocol):
    """Scores of samples that are being made."""

    def add(self, texts: Mapping[int, str]) -> None:
        """Responses of this rank's engine that have ended, by number."""
        ...

    def exchange(self) -> None:
        """Bring them to who scores them. Collective."""
        ...


class Listener(Protocol):
    """Hears of samples while others are generated."""

    def ended(self, completions: Mapping[int, Completion]) -> None:
        """Samples that this rank's engine has finished, by number."""
        ...

    def exchange(self) -> None:
        """Collective: called by all ranks about every half second, and at last when all has
        ended."""
        ...


def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    n: int,
    run: Run,
    metrics: Metrics,
    listener: Listener,
) -> tuple[list[int], Completions]:
    """Numbers and completions of the samples of this rank's engine, ascending.

    Number i is sample i % n of prompt i // n. A rank that leads no engine has none. The engine's
    metrics are added to `metrics`. Collective over all ranks. Raises StopRequested, or RuntimeError
    when an engine fails or a prompt is too long, on all ranks alike.
    """
    requests = make_requests(prompts, n)
    expected = [len(prompt.prompt_ids) + params.max_new_tokens / 2 for prompt in prompts]
    shares = spread(expected, n=n, replicas=run.mesh.dims.rollout_dp)
    finished, found = run.drive(
        _serve(engine, params, requests, shares, run.mesh, listener),
        label="generate",
        holds_collectives=engine.generates_together,
    )
    for name, value in found.items():
        metrics.add(name, value, 1)
    numbers = sorted(finished)
    return numbers, Completions.of([finished[number] for number in numbers])


def make_requests(prompts: Sequence[Prompt], n: int) -> list[Request]:
    """n requests per prompt: number p * n + s is sample s of prompt p.

    A prompt that is twice in the batch goes on counting samples: its uids stay unique.
    """
    seen: Counter[int] = Counter()
    requests = []
    for prompt in prompts:
        first = prompt.uid * UIDS_PER_PROMPT + seen[prompt.uid]
        seen[prompt.uid] += n
        requests += [Request(first + sample, prompt.prompt_ids) for sample in range(n)]
    assert max(seen.values(), default=0) <= UIDS_PER_PROMPT
    return requests


def spread(lengths: Sequence[float], *, n: int, replicas: int) -> list[list[int]]:
    """Request numbers of each replica, the longest first, with loads as equal as possible.

    `lengths` are the expected tokens of one sample of each prompt. The samples of a prompt stay
    together unless that leaves the fullest replica more than 10 % above the mean.
    """
    whole = largest_first(lengths, replicas)
    loads = [sum(lengths[p] for p in share) for share in whole]
    if max(loads) * replicas <= _MAX_IMBALANCE * sum(loads):
        return [[p * n + s for p in share for s in range(n)] for share in whole]
    return largest_first([length for length in lengths for _ in range(n)], replicas)


class Queues:
    """Requests that wait for an engine, one queue for each; every rank holds the same.

    An engine whose queue is empty takes from the end of the longest one, if it `steals`.
    """

    def __init__(self, shares: Sequence[Sequence[int]], *, steals: bool = True) -> None:
        self._waiting, self._steals = [deque(share) for share in shares], steals

    def hand_out(self, rooms: Sequence[int]) -> list[list[int]]:
        """Requests for each engine, which has room for so many more."""
        given: list[list[int]] = []
        for queue, room in zip(self._waiting, rooms, strict=True):
            given.append([queue.popleft() for _ in range(min(room, len(queue)))])
        for taken, room in zip(given, rooms, strict=True) if self._steals else ():
            while len(taken) < room and (longest := max(self._waiting, key=len)):
                taken.append(longest.pop())
        return given


def _serve(
    engine: Engine,
    params: SamplingParams,
    requests: Sequence[Request],
    shares: Sequence[Sequence[int]],
    mesh: Mesh,
    listener: Listener,
) -> Generator[float, None, tuple[dict[int, Completion], dict[str, float]]]:
    """Begin, hand requests out until all have ended: what the engine made, on its leader, and its
    metrics. Whatever fails on one rank fails in a step, and the poll behind it tells the others."""
    longest = max(len(request.prompt_ids) for request in requests)
    generation = engine.begin(params, longest_prompt=longest, most=max(map(len, shares)))
    try:
        yield 0.0
        made = yield from _hand_out(generation, requests, Queues(shares), mesh, listener)
        return made, generation.metrics()
    finally:
        generation.close()


def _hand_out(
    generation: Generation,
    requests: Sequence[Request],
    queues: Queues,
    mesh: Mesh,
    listener: Listener,
) -> Generator[float, None, dict[int, Completion]]:
    number_of = {request.uid: number for number, request in enumerate(requests)}
    leads, mine = mesh.rollout_tp_rank == 0, mesh.rollout_dp_rank
    made: dict[int, Completion] = {}
    unfinished = 0
    while True:
        # exchanges first: a rank that fails after them still comes to the poll that follows
        told = torch.zeros(mesh.dims.rollout_dp, 3, dtype=torch.long)
        if leads:
            told[mine] = torch.tensor([generation.room, unfinished, len(made)])
        dist.all_reduce(told, group=mesh.host_group)
        listener.exchange()
        given = queues.hand_out(told[:, 0].tolist())
        if not any(given) and not told[:, 1].any():
            return made
        generation.submit([requests[number] for number in given[mine]])
        ended = {number_of[uid]: completion for uid, completion in generation.advance()}
        unfinished += len(given[mine]) - len(ended)
        if leads:
            made |= ended
            listener.ended(ended)
        yield int(told[:, 2].sum()) / len(requests)
