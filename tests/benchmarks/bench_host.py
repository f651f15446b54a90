"""Host work of one iteration between the engine and the device, as one of many ranks does it.

    python -m tests.benchmarks.bench_host [--world_sizes 8 64] [--responses 8192] [--longest 8192]

Responses of lognormal lengths, 24 M tokens of 8,192; 8 to a prompt of 200 tokens; 16 mini-batches
each for actor and critic. Everything that the trainer does runs, but models and what they compute:
texts, layout, exchange, KL, rewards, GAE, whitening, micro-batches, loss weights, metrics. The
other ranks are not there: collectives carry this rank's part alone, which is what it does of them.
Seconds are of this process's core; the peak is of its memory, beyond what it held before.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import train_ppo
from ppo.batch.overview import Overview
from ppo.batch.packing import Batcher
from ppo.batch.samples import Samples
from ppo.batch.shares import overview_of, owners_of, share_out
from ppo.config import Config, load_config
from ppo.data.dataset import Prompt
from ppo.engines.contract import Completions
from ppo.guards.guard import Guard
from ppo.kl import make_kl_controller
from ppo.metrics import Metrics
from ppo.models.tiny import build_tiny_tokenizer
from ppo.step_metrics import summarise_batch
from ppo.update.steps import Part, _Update, epoch_mini_batches
from sharding.mesh import Mesh, ParallelDims
from sharding.partition import Budget

# targets for 8,192 responses by number of ranks: seconds of a core, GiB
TARGETS = {8: (6.0, 1.5), 64: (1.5, 0.5)}
MEAN, PROMPT, SAMPLES, MINI_BATCHES, PACKED = 24e6 / 8192, 200, 8, 16, 16384


def lengths_of(count: int, longest: int) -> Tensor:
    """Lognormal lengths, cut at the longest, whose mean is MEAN."""
    noise = torch.randn(count, generator=torch.Generator().manual_seed(0)).exp()
    low, high = 1.0, float(longest)
    for _ in range(40):  # bisection for the median
        median = (low + high) / 2
        is_enough = (noise * median).clamp(1, longest).mean() >= MEAN
        low, high = (low, median) if is_enough else (median, high)
    return (noise * high).clamp(1, longest).long()


def mesh_of(world_size: int) -> Mesh:
    """Rank 0 of so many, whose groups reach nobody."""
    group: Any = dist.group.WORLD
    nothing: Any = None
    dims = ParallelDims(world_size=world_size, ranks_per_node=8, fsdp_size=world_size)
    names = ("host_group", "dp_group", "node_group", "shard_group", "replicate_group", "sp_group")
    groups: dict[str, Any] = dict.fromkeys(names, group)
    return Mesh(
        dims=dims,
        rank=0,
        device=torch.device("cpu"),
        fsdp=nothing,
        timeout=nothing,
        rollout_group=group,
        rollout_host_group=group,
        rollout=nothing,
        **groups,
    )


class Stopwatch:
    """Seconds of this process's core by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of the block."""
        start = time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - start


class Nothing:
    """A learner that learns nothing: what is left of an update is the host's work."""

    name, module = "model", nn.Identity()

    def set_lr(self, step: int, adjusted: Any) -> float:
        """No rate."""
        return 0.0

    def clip_gradients(self) -> Tensor:
        """No norm."""
        return torch.zeros(())

    def step(self) -> None:
        """No weights."""

    @contextmanager
    def updating(self) -> Iterator[nn.Module]:
        """No model."""
        yield self.module


def take_all(update: Any, module: nn.Module, part: Part) -> Tensor:
    """Brings to the device what losses need."""
    for values in update.batch.per_token().values():
        part.micro.take(values)
    return torch.zeros((), requires_grad=True)


def run(config: Config, world_size: int, lengths: Tensor) -> Stopwatch:
    """One iteration of rank 0."""
    mesh, watch, metrics = mesh_of(world_size), Stopwatch(), Metrics()
    count = len(lengths)
    g = np.random.default_rng(0)
    prompt = g.integers(0, 256, PROMPT).tolist()
    prompts = [Prompt(i, prompt, "any", "", {}, "") for i in range(count // SAMPLES)]
    mine = list(range(count // world_size))  # what the engine of this rank has made
    sizes = lengths[mine].tolist()
    completions = Completions(
        g.integers(0, 256, sum(sizes), dtype=np.int32),
        np.full(sum(sizes), -1.0, np.float32),
        sizes,
        ["stop"] * len(mine),
    )
    tokenizer = build_tiny_tokenizer()
    with watch.timed("texts"):
        ids = [completions.ids[start:end].tolist() for start, end in completions.borders()]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        texts = [text.encode("utf-8", "replace").decode() for text in texts]
    with watch.timed("layout and exchange"):
        samples = Samples(
            prompts=prompts, n=SAMPLES, numbers=mine, completions=completions, texts=texts
        )
        overview, _ = overview_of(samples, mesh)
        overview = told(overview, lengths)
        holders = torch.arange(world_size).repeat_interleave(count // world_size)
        parts = epoch_mini_batches(overview, config.actor, seed=0, step=1)
        budget = Budget(dp=world_size, tokens=PACKED, hidden_size=4096)
        batcher = Batcher(mesh=mesh, budget=budget, packed=True)
        owners = owners_of(overview, parts, batcher.budget)
        batch = share_out(samples, overview, holders, owners, mesh)
    everything = [list(range(count))]
    for name, plans in (
        ("old_logprobs", parts),
        ("ref_logprobs", everything),
        ("values", everything),
    ):
        with watch.timed("forward passes"):
            for plan in batcher.plan(batch, plans):
                for rows in plan:
                    batcher.make(batch, rows)
        setattr(batch, name, batch.rollout_logprobs + 0.1 * torch.rand(batch.response_mask.shape))
    with watch.timed("advantages"):
        controller = make_kl_controller(config.algorithm.kl_ctrl)
        train_ppo.add_advantages(batch, config, controller, metrics, mesh.dp_group)
    with watch.timed("updates"):
        learner: Any = Nothing()
        for section in (config.critic, config.actor):
            update = _Update(learner, batch, section, config, batcher, metrics, Guard())
            update.run(1, take_all)
    with watch.timed("metrics"):
        summarise_batch(batch, batcher, metrics)
        metrics.reduce()
    return watch


def told(overview: Overview, lengths: Tensor) -> Overview:
    """What the other ranks would have told."""
    return replace(
        overview,
        prompt_lengths=torch.full_like(lengths, PROMPT),
        response_lengths=lengths,
        scores=torch.rand(len(lengths)),
    )


def memory_gib(name: str) -> float:
    """VmRSS or VmHWM of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.bench_host",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--world_sizes", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--responses", type=int, default=8192)
    parser.add_argument("--longest", type=int, default=8192)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lengths = lengths_of(args.responses, args.longest)
    groups = args.responses // SAMPLES
    config = load_config(
        "ppo_tiny.yaml",
        [
            f"data.train_batch_size={groups}",
            f"actor.ppo_mini_batch_size={max(1, groups // MINI_BATCHES)}",
            f"data.max_response_length={args.longest}",
        ],
    )
    sys.stdout.write(f"{len(lengths)} responses, {int(lengths.sum())} tokens\n")
    for world_size in args.world_sizes:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = memory_gib("VmRSS")
        watch = run(config, world_size, lengths)
        peak = memory_gib("VmHWM") - before
        dist.destroy_process_group()
        total = sum(watch.seconds.values())
        most = TARGETS.get(world_size)
        target = "" if most is None else f" (targets {most[0]:g} s, {most[1]:g} GiB)"
        parts = ", ".join(f"{name} {taken:.2f}" for name, taken in watch.seconds.items())
        sys.stdout.write(
            f"one of {world_size} ranks: {total:.2f} s, peak {peak:.2f} GiB{target}: {parts}\n"
        )


if __name__ == "__main__":
    main()
