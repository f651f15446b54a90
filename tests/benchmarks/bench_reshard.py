"""The reshard against a full all-gather, parameter by parameter: time, bytes and peak memory.

    python -m tests.benchmarks.bench_reshard [--ranks 4 8] [--hidden 1024] [--bucket_mib 16]

Both bring the same FSDP2 shards (float32) as bfloat16 into the same engine slices, on gloo ranks of
this machine, in one run and in turns. The all-gather casts first, so that it too sends bfloat16.
Times are the fewest of the repeats: seconds by the clock between two barriers, and seconds of CPU
summed over ranks (others may use the machine too). The peak is of live tensors beyond shards and
engine. Target: less time in every case with T > 1, a peak of two buckets.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from sharding.fsdp import shard_model
from sharding.layout import Region, row_parallel_weight, view_2d
from sharding.mesh import ParallelDims, build_mesh
from sharding.reshard.resharder import Bucket, Resharder
from sharding.reshard.shards import named_shards
from tests.distributed import run_distributed
from tests.peak_memory import PeakTracker

CPU, DTYPE, MIB = torch.device("cpu"), torch.bfloat16, 2**20


class Options(NamedTuple):
    hidden: int
    bucket_mib: float
    repeats: int


class Measured(NamedTuple):
    """One way of one case; ``wall_s`` of the slowest rank, ``cpu_s`` of all ranks together."""

    wall_s: float
    cpu_s: float
    received_bytes: int
    peak_bytes: int


def llama(hidden: int) -> LlamaForCausalLM:
    """About 126 million parameters at hidden 1024: 240 MiB in bfloat16."""
    config = LlamaConfig(
        vocab_size=16 * hidden,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


class Case:
    """One mesh and placement: sharded model, engine slices, and both ways to fill them."""

    def __init__(self, model: nn.Module, dims: ParallelDims, *, aligned: bool, bucket_mib: float):
        mesh = build_mesh(dims, CPU)
        chosen = row_parallel_weight("llama") if aligned else None
        shard_model(model, mesh, param_dtype=DTYPE, reduce_dtype=torch.float32, shard_dim1=chosen)
        model.to_empty(device=CPU)
        self.module, self.num_shards = model, dims.shard_size
        self.shards = [p for _, p in named_shards(model) if isinstance(p, DTensor)]
        for shard in self.shards:
            shard.to_local().detach().normal_()
        self.resharder = Resharder(
            model,
            mesh,
            style="sglang",
            hf_config=model.config,
            dtype=DTYPE,
            bucket_mib=bucket_mib,
        )
        layout = self.resharder.layout
        self.engine = {name: torch.zeros(s, dtype=DTYPE) for name, s in layout.targets.items()}
        self.regions: dict[str, list[Region]] = {}
        for region in layout.regions:
            self.regions.setdefault(region.source, []).append(region)

    def reshard(self) -> None:
        for bucket in self.resharder.buckets():
            self.load(bucket)
            del bucket

    def load(self, bucket: Bucket) -> None:
        for entry, block in bucket.views():
            rows = slice(entry.dst_row, entry.dst_row + entry.rows)
            self.engine[entry.target][rows, entry.dst_col : entry.dst_col + entry.cols] = block

    def all_gather(self) -> None:
        for (name, _), shard in zip(named_shards(self.module), self.shards, strict=True):
            full = cast(DTensor, shard.detach().to(DTYPE)).full_tensor()
            whole = full.view(view_2d(full.shape))
            for r in self.regions.get(name, []):
                block = whole[r.src_row : r.src_row + r.rows, r.src_col : r.src_col + r.cols]
                rows = slice(r.dst_row, r.dst_row + r.rows)
                self.engine[r.target][rows, r.dst_col : r.dst_col + r.cols] = block
            del full, whole

    def all_gather_bytes(self) -> int:
        return (
            sum(shard.numel() for shard in self.shards)
            * DTYPE.itemsize
            * (self.num_shards - 1)
            // self.num_shards
        )


def measure(case: Case, repeats: int) -> tuple[Measured, Measured]:
    """(reshard, all-gather), in turns; the two must fill the engine alike."""
    ways: list[Callable[[], None]] = [case.reshard, case.all_gather]
    peaks, filled = [], []
    for way in ways:
        with PeakTracker(CPU) as tracker:
            way()
        peaks.append(tracker.extra_bytes)
        filled.append({name: tensor.clone() for name, tensor in case.engine.items()})
    assert all(torch.equal(tensor, filled[1][name]) for name, tensor in filled[0].items())
    del filled
    times = [[timed(way) for way in ways] for _ in range(repeats)]
    received = [case.resharder.stats.received_bytes, case.all_gather_bytes()]
    assert received[0] == case.resharder.stats.lower_bound_bytes
    reshard, gather = (
        Measured(
            min(wall for wall, _ in (row[way] for row in times)),
            min(cpu for _, cpu in (row[way] for row in times)),
            received[way],
            peaks[way],
        )
        for way in (0, 1)
    )
    return reshard, gather


def timed(way: Callable[[], None]) -> tuple[float, float]:
    """(seconds between barriers, CPU seconds of all ranks)."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    way()
    used = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
    dist.all_reduce(used)
    return time.perf_counter() - wall, used.item()


def run_rank(rank: int, world_size: int, options: Options) -> list[tuple[str, Measured, Measured]]:
    results = []
    for tp in (t for t in (1, 2, 4, 8) if t <= world_size):
        for aligned in (False, True) if tp > 1 else (False,):
            dims = ParallelDims(world_size=world_size, ranks_per_node=world_size, rollout_tp=tp)
            case = Case(llama(options.hidden), dims, aligned=aligned, bucket_mib=options.bucket_mib)
            placement = "aligned" if aligned else "dim 0"
            name = f"| {world_size} | {tp} | {placement} "
            results.append((name, *measure(case, options.repeats)))
            del case
    return results


def table(results: list[tuple[str, Measured, Measured]]) -> Iterator[str]:
    yield (
        "| F | T | shards | reshard s | all-gather s | faster | reshard CPU s | all-gather CPU s "
        "| received MiB | all-gather MiB | peak MiB | all-gather peak MiB |"
    )
    yield "|--:|--:|---|" + "--:|" * 9
    for name, ours, theirs in results:
        yield name + (
            f"| {ours.wall_s:.2f} | {theirs.wall_s:.2f} | {theirs.wall_s / ours.wall_s:.2f}x "
            f"| {ours.cpu_s:.2f} | {theirs.cpu_s:.2f} "
            f"| {ours.received_bytes / MIB:.1f} | {theirs.received_bytes / MIB:.1f} "
            f"| {ours.peak_bytes / MIB:.1f} | {theirs.peak_bytes / MIB:.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.bench_reshard",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--bucket_mib", type=float, default=16, help="send + receive")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    options = Options(given.hidden, given.bucket_mib, given.repeats)
    results = []
    for ranks in given.ranks:
        by_rank = run_distributed(run_rank, ranks, options, timeout_s=600)
        for cases in zip(*by_rank, strict=True):
            ways = [[measured[i] for measured in cases] for i in (1, 2)]
            results.append((cases[0][0], *(worst(of_ranks) for of_ranks in ways)))
    for line in table(results):
        sys.stdout.write(line + "\n")


def worst(of_ranks: list[Any]) -> Measured:
    """The largest value of every measure over ranks."""
    return Measured(*(max(values) for values in zip(*of_ranks, strict=True)))


if __name__ == "__main__":
    main()
