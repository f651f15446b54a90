"""Prompts to completions over all engines: each makes its share."""

from collections import Counter
from collections.abc import Sequence

from ppo.data.dataset import Prompt
from ppo.engines.contract import Completions, Engine, Request, SamplingParams
from ppo.metrics import Metrics
from ppo.run.run import Run
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
) -> tuple[list[int], Completions]:
    """Numbers and completions of the samples of this rank's engine, ascending.

    Number i is sample i % n of prompt i // n. A rank that leads no engine has none. The engine's
    metrics are added to `metrics`. Collective over all ranks. Raises StopRequested, or RuntimeError
    when an engine fails or a prompt is too long, on all ranks alike.
    """
    mesh = run.mesh
    requests = make_requests(prompts, n)
    lengths = [len(prompt.prompt_ids) + params.max_new_tokens / 2 for prompt in prompts]
    shares = spread(lengths, n=n, replicas=mesh.dims.rollout_dp)
    share = shares[mesh.rollout_dp_rank]
    work = engine.generate([requests[i] for i in share], params)
    together = engine.generates_together
    generated = run.drive(work, label="generate", holds_collectives=together)
    for name, value in generated.metrics.items():
        metrics.add(name, value, 1)
    if mesh.rollout_tp_rank != 0:
        return [], Completions.of([])
    numbers = [request % len(prompts) * n + request // len(prompts) for request in share]
    order = sorted(range(len(share)), key=numbers.__getitem__)
    return [numbers[i] for i in order], generated.completions.pick(order)


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
