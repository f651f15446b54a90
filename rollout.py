r"""Generation: n samples per prompt, spread over the engines, back in order on every rank.

    torchrun --nproc_per_node=8 rollout.py --config ppo.yaml --data FILE --out samples.parquet \
        [--checkpoint RUN_OR_STEP_OR_HF_FOLDER] [key.sub=value ...]

As a module it owns the way from prompts to completions that training and validation share, and must
not know rewards or training. As a program it generates and scores (ppo/evaluation.py).

Communication: `generate` polls over the host group while it waits and gathers over it at the end.
"""

import heapq
import importlib.util
import logging
import os
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from ppo.config import Config
from ppo.data.dataset import Prompt
from ppo.engines.contract import Completion, Engine, Request, SamplingParams
from ppo.run import Run
from sharding.mesh import Mesh

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

UIDS_PER_PROMPT = 2**20
"""Sample numbers that a prompt's uid leaves room for."""
# Replicas get whole prompts, whose samples share a prefix, up to this load over the mean load.
_MAX_IMBALANCE = 1.1


def build_engine(
    config: Config,
    mesh: Mesh,
    model_path: Path,
    tokenizer: "PreTrainedTokenizerBase",
    run_dir: Path,
    *,
    module: Any,
) -> Engine:
    """The engine of `rollout.engine`; auto is SGLang where there are CUDA and sglang.

    `module` is the sharded actor with its Hugging Face `config`; model_path is the folder that has
    this configuration as a file, and run_dir takes the engine's log. Collective.
    """
    rollout = config.rollout
    kind = rollout.engine
    if kind == "auto":
        found = mesh.device.type == "cuda" and importlib.util.find_spec("sglang") is not None
        kind = "sglang" if found else "torch"
        logger.info("rollout.engine=auto: %s", kind)
    if kind == "sglang":
        from ppo.engines.sglang_engine import SGLangEngine

        logs = run_dir / "logs"
        return SGLangEngine(config, mesh, module, model_path=str(model_path), log_dir=logs)
    from ppo.engines.embedded import TorchEngine

    return TorchEngine(
        module.config,
        mesh,
        tokenizer,
        dtype=getattr(torch, rollout.dtype),
        max_model_len=rollout.max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        reshard_bucket_mib=rollout.reshard_bucket_mib,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        verify_weights=_verify_every(rollout.verify_weights),
        trust_remote_code=config.model.trust_remote_code,
    )


def _verify_every(verify_weights: str | int) -> int:
    """rollout.verify_weights as a number of wakes; "first" is once in any run."""
    words = {"never": 0, "first": sys.maxsize}
    return words[verify_weights] if isinstance(verify_weights, str) else verify_weights


def generate(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, *, n: int, run: Run
) -> list[Completion]:
    """n completions of each prompt, on every rank: number i is sample i % n of prompt i // n.

    Collective over all ranks. Raises StopRequested, or RuntimeError when an engine fails or a
    prompt is too long, on all ranks alike.
    """
    mesh = run.mesh
    requests = make_requests(prompts, n)
    lengths = [len(prompt.prompt_ids) + params.max_new_tokens / 2 for prompt in prompts]
    shares = spread(lengths, n=n, replicas=mesh.dims.rollout_dp)
    share = shares[mesh.rollout_dp_rank]
    run.drive(engine.generate([requests[i] for i in share], params), label="generate")
    completions = _gather(engine.completions, shares, mesh)
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
    whole = _longest_first(lengths, replicas)
    loads = [sum(lengths[p] for p in share) for share in whole]
    if max(loads) * replicas <= _MAX_IMBALANCE * sum(loads):
        return [[s * number + p for s in range(n) for p in sorted(share)] for share in whole]
    return [sorted(share) for share in _longest_first(list(lengths) * n, replicas)]


def _longest_first(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Greedy partition: the largest cost that is left goes to the part with the least."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0.0, part) for part in range(parts)]
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, part = heapq.heappop(loads)
        shares[part].append(index)
        heapq.heappush(loads, (load + costs[index], part))
    return shares


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
    parts: list[_Packed | None] = [None] * mesh.dims.world_size
    dist.all_gather_object(parts, mine, group=mesh.host_group)
    merged: dict[int, Completion] = {}
    packed = (part for part in parts if part is not None)  # in the order of the replicas
    for share, part in zip(shares, packed, strict=True):
        merged.update(zip(share, part.unpack(), strict=True))
    return [merged[number] for number in range(len(merged))]


@record
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done or stopped; 2 wrong configuration, data or weights."""
    # They build on this module.
    from ppo.errors import InputError
    from ppo.evaluation import evaluate, load_evaluation, parse_options
    from ppo.start import Launch, open_run

    launch = Launch.from_env(os.environ)
    try:
        options = parse_options(sys.argv[1:] if argv is None else argv)
        config = load_evaluation(options, launch.problems)
        with open_run(config, launch, sys.argv) as run:
            evaluate(config, run, options)
    except InputError as error:
        return launch.report(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
