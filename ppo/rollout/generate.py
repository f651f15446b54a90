"""Prompts to completions over all engines, in order on every rank."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from ppo.data.dataset import Prompt
from ppo.engines.contract import Completion, Engine, Request, SamplingParams
from ppo.metrics import Metrics
from ppo.run.run import Run
from sharding.agree import gather
from sharding.mesh import Mesh
from sharding.partition import largest_first

UIDS_PER_PROMPT = 2**20
"""Sample numbers that a prompt's uid leaves room for."""
# Replicas get whole prompts, whose samples share a prefix, up to this load over the mean load.
_MAX_IMBALANCE = 1.1


def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    n: int,
    run: Run,
    metrics: Metrics,
) -> list[Completion]:
    """n completions of each prompt, on every rank: number i is sample i % n of prompt i // n.

    The engine's metrics are added to `metrics`. Collective over all ranks. Raises StopRequested,
    or RuntimeError when an engine fails or a prompt is too long, on all ranks alike.
    """
    mesh = run.mesh
    requests = make_requests(prompts, n)
    lengths = [len(prompt.prompt_ids) + params.max_new_tokens / 2 for prompt in prompts]
    shares = spread(lengths, n=n, replicas=mesh.dims.rollout_dp)
    share = shares[mesh.rollout_dp_rank]
    work = engine.generate([requests[i] for i in share], params)
    generated = run.drive(work, label="generate")
    for name, value in generated.metrics.items():
        metrics.add(name, value, 1)
    completions = _gather(generated.completions, shares, mesh)
    return [completions[s * len(prompts) + p] for p in range(len(prompts)) for s in range(n)]


def make_requests(prompts: Sequence[Prompt], n: int) -> list[Request]:
    """n requests per prompt, sample-major: number s * len(prompts) + p is sample s of prompt p.

    The first sample of every prompt comes first, so that its prefix is cached when its siblings
    come. A prompt that is twice in the batch goes on counting samples: its uids stay unique.
    """
    seen: Counter[int] = Counter()
    first = []
    for prompt in prompts:
        first.append(prompt.uid * UIDS_PER_PROMPT + seen[prompt.uid])
        seen[prompt.uid] += n
    assert max(seen.values(), default=0) <= UIDS_PER_PROMPT
    return [
        Request(uid + sample, prompt.prompt_ids)
        for sample in range(n)
        for uid, prompt in zip(first, prompts, strict=True)
    ]


def spread(lengths: Sequence[float], *, n: int, replicas: int) -> list[list[int]]:
    """Request numbers (sample-major) of each replica, ascending, with loads as equal as possible.

    `lengths` are the expected tokens of one sample of each prompt. The samples of a prompt stay
    together unless that leaves the fullest replica more than 10 % above the mean.
    """
    number = len(lengths)
    whole = largest_first(lengths, replicas)
    loads = [sum(lengths[p] for p in share) for share in whole]
    if max(loads) * replicas <= _MAX_IMBALANCE * sum(loads):
        return [[s * number + p for s in range(n) for p in sorted(share)] for share in whole]
    return [sorted(share) for share in largest_first(list(lengths) * n, replicas)]


class _Packed(NamedTuple):
    """Completions as arrays: pickled as they are, not number by number."""

    ids: np.ndarray
    logprobs: np.ndarray
    lengths: list[int]
    reasons: list[str]

    @classmethod
    def of(cls, completions: Sequence[Completion]) -> "_Packed":
        return cls(
            np.array([t for c in completions for t in c.response_ids], dtype=np.int32),
            np.array([p for c in completions for p in c.logprobs], dtype=np.float32),
            [len(c.response_ids) for c in completions],
            [c.finish_reason for c in completions],
        )

    def unpack(self) -> list[Completion]:
        ids, logprobs = self.ids.tolist(), self.logprobs.tolist()
        borders = pairwise(accumulate(self.lengths, initial=0))
        return [
            Completion(ids[start:end], logprobs[start:end], reason)
            for (start, end), reason in zip(borders, self.reasons, strict=True)
        ]


def _gather(
    completions: Sequence[Completion], shares: Sequence[Sequence[int]], mesh: Mesh
) -> list[Completion]:
    """Completions of all requests, by request number; each rollout group's leader sends its own."""
    mine = _Packed.of(completions) if mesh.rollout_tp_rank == 0 else None
    merged: dict[int, Completion] = {}
    parts = gather(mine, mesh.host_group)
    packed = (part for part in parts if part is not None)  # in the order of the replicas
    for share, part in zip(shares, packed, strict=True):
        merged.update(zip(share, part.unpack(), strict=True))
    return [merged[number] for number in range(len(merged))]
