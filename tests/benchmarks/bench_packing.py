"""Packed rows against padded ones: time and peak of a model's update on long-tailed lengths.

    python -m tests.benchmarks.bench_packing [--sequences 12] [--max_length 256] [--repeats 2]

Forward and backward of a model in SmolLM2-135M's shape (bfloat16, gradient checkpointing) over the
same sequences: one packed row, or rows padded to the longest. The mean length is about 0.4 of the
longest. One thread on a CPU.
"""

import argparse
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sharding.mesh import ParallelDims, build_mesh, init_distributed
from tests.benchmarks.measure import build_smollm2_shape, fastest, peak_mib
from tests.ppo.models.hf_models import packed_inputs, padded_inputs

TARGET = 1.5


def long_tailed_documents(count: int, longest: int) -> list[Tensor]:
    """Lengths proportional to (i / count) ** 1.8: many short, few long."""
    lengths = [max(2, round(longest * (i / count) ** 1.8)) for i in range(1, count + 1)]
    return [torch.randint(3, 49152, (n,)) for n in lengths]


def update(module: Any, inputs: dict[str, Tensor]) -> None:
    module(**inputs).logprobs.mean().backward()
    module.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.bench_packing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sequences", type=int, default=12)
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    documents = long_tailed_documents(args.sequences, args.max_length)
    tokens = sum(len(d) for d in documents)
    with init_distributed(device):
        module = build_smollm2_shape(
            build_mesh(ParallelDims(world_size=1, ranks_per_node=1), device)
        )
        works = {}
        for name, make in (("padded", padded_inputs), ("packed", packed_inputs)):
            inputs = {
                k: v if k == "cu_seqlens" else v.to(device) for k, v in make(documents).items()
            }
            works[name] = partial(update, module, inputs)
        peaks = {name: peak_mib(work, device) for name, work in works.items()}
        times = fastest(works, device, args.repeats)
    share = tokens / len(documents) / max(len(d) for d in documents)
    sys.stdout.write(f"{len(documents)} sequences, {tokens} tokens, mean/max length {share:.2f}\n")
    for name in works:
        sys.stdout.write(
            f"{name} {times[name]:8.2f} s {tokens / times[name]:8.0f} tokens/s "
            f"{peaks[name]:7.0f} MiB\n"
        )
    sys.stdout.write(
        f"packed is {times['padded'] / times['packed']:.2f} x as fast (target {TARGET})\n"
    )


if __name__ == "__main__":
    main()
