"""Chunked log-probs against full logits: time and peak, the head alone and a whole update.

    python -m tests.benchmarks.bench_logprobs [--tokens 2048] [--update_tokens 512] [--repeats 3]

The head alone: vocabulary 151,936 and hidden 896 (Qwen2.5-0.5B), float32 on a CPU, bfloat16 on
CUDA, forward and backward to hidden states and weight. The update: forward and backward of a model
in SmolLM2-135M's shape with gradient checkpointing, every token scored. One thread on a CPU.

Both ways hold the gradient of the weight (519 MiB in float32), so the ratio of peaks falls with the
number of tokens.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ppo.logprobs import LabelLogprobs, token_logprobs
from sharding.mesh import ParallelDims, build_mesh, init_distributed
from tests.benchmarks.measure import build_smollm2_shape, fastest, peak_mib

VOCAB, HIDDEN = 151_936, 896
PEAK_TARGET, HEAD_TARGET, UPDATE_TARGET = 0.25, 1.45, 1.1


def full_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor, **_: Any) -> LabelLogprobs:
    """The usual way: all logits, log_softmax in float32, gather."""
    logprobs = torch.log_softmax((hidden @ weight.t()).float(), -1)
    return LabelLogprobs(logprobs.gather(1, labels[:, None]).sum(1), None)


def head_works(
    tokens: int, device: torch.device, *, vocab: int = VOCAB, hidden: int = HIDDEN
) -> dict[str, Callable[[], Any]]:
    """Forward and backward of the head alone, both ways, on the same numbers."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    states = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    weight = torch.empty(vocab, hidden, device=device, dtype=dtype).normal_(std=0.02)
    labels = torch.randint(0, vocab, (tokens,), device=device)
    weight.requires_grad_()

    def run(score: Callable[..., LabelLogprobs]) -> None:
        states.grad = weight.grad = None
        score(states, weight, labels).logprobs.mean().backward()
        states.grad = weight.grad = None

    return {"full": partial(run, full_logprobs), "chunked": partial(run, token_logprobs)}


def update_works(tokens: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), device)
    module = build_smollm2_shape(mesh)
    documents = 4
    ids = torch.randint(0, 49152, (1, tokens), device=device)
    inputs = {
        "input_ids": ids,
        "position_ids": torch.arange(tokens // documents, device=device).repeat(documents)[None],
        "cu_seqlens": torch.arange(documents + 1) * (tokens // documents),
        "positions": torch.arange(tokens, device=device),
        "labels": ids[0].roll(-1),
    }

    def run(score: Callable[..., LabelLogprobs]) -> None:
        with patch("ppo.models.forward.token_logprobs", score):
            module(**inputs).logprobs.mean().backward()
        module.zero_grad(set_to_none=True)

    return {"full": partial(run, full_logprobs), "chunked": partial(run, token_logprobs)}


def report(title: str, times: dict[str, float], peaks: dict[str, float], targets: str) -> str:
    time_ratio = times["chunked"] / times["full"]
    peak_ratio = peaks["chunked"] / peaks["full"]
    lines = [f"{title} (targets: {targets})"]
    lines += [f"  {n:8} {times[n]:8.2f} s {peaks[n]:9.0f} MiB" for n in ("full", "chunked")]
    return "\n".join([*lines, f"  ratio    {time_ratio:8.2f}   {peak_ratio:9.2f}"])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.bench_logprobs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--update_tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with init_distributed(device):
        for title, works, targets in (
            (
                f"head alone, {args.tokens} tokens, vocabulary {VOCAB}, hidden {HIDDEN}",
                head_works(args.tokens, device),
                f"time <= {HEAD_TARGET}, peak <= {PEAK_TARGET}",
            ),
            (
                f"whole update in SmolLM2's shape, {args.update_tokens} tokens",
                update_works(args.update_tokens, device),
                f"time <= {UPDATE_TARGET}",
            ),
        ):
            peaks = {name: peak_mib(work, device) for name, work in works.items()}
            times = fastest(works, device, args.repeats)
            sys.stdout.write(report(title, times, peaks, targets) + "\n")


if __name__ == "__main__":
    main()
