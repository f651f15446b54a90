"""What each setting that saves memory costs in time: one update of the actor.

    python -m tests.benchmarks.bench_memory [--layers 6] [--tokens 2048] [--repeats 3]

Two micro-batches through a model in SmolLM2-135M's width (float32, one document each, of which the
last quarter is scored), clipping and one AdamW step. Seconds are of this process's cores, the
fastest of the repeats, taken in turns; MiB are the peak of live tensors, weights and moments
included. With the optimizer on the host a CPU pretends to be a device (tests/fake_device.py), and
what lies in host memory is not counted.
"""

import argparse
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ppo.config import FsdpConfig, MixedPrecisionConfig, ModelConfig, OptimConfig
from ppo.models.build import build_causal_lm
from ppo.models.learner import Learner, make_optimizer
from sharding.mesh import Mesh, ParallelDims, build_mesh, init_distributed
from tests.benchmarks.measure import fastest, save_smollm2_shape
from tests.fake_device import fake_device
from tests.peak_memory import PeakTracker

ROWS = 256
SETTINGS: dict[str, dict[str, Any]] = {
    "checkpoint_policy=full (default)": {},
    "checkpoint_policy=selective": {"checkpoint_policy": "selective"},
    "checkpoint_policy=none": {"checkpoint_policy": "none"},
    f"full, mlp_block_rows={ROWS}": {"mlp_block_rows": ROWS},
    f"none, mlp_block_rows={ROWS}": {"checkpoint_policy": "none", "mlp_block_rows": ROWS},
    "optim.state_dtype=bfloat16": {"state_dtype": "bfloat16"},
    "optim.state_dtype=8bit": {"state_dtype": "8bit"},
    "fsdp.optimizer_on_host=true": {"on_host": True},
}


def make_learner(
    folder: Path, mesh: Mesh, *, state_dtype: Any = None, on_host: bool = False, **model: Any
) -> Learner:
    """An actor with float32 weights and computation."""
    config, optim = ModelConfig(path=str(folder), **model), OptimConfig(state_dtype=state_dtype)
    module = build_causal_lm(
        folder,
        mesh,
        model_config=config,
        fsdp_config=FsdpConfig(mixed_precision=MixedPrecisionConfig(param_dtype="float32")),
        checkpointing=config.policy != "none",
        forward_only=False,
        dtype=torch.float32,
    )
    return Learner(
        name="actor",
        module=module,
        optimizer=make_optimizer(module, optim, mesh.device, on_host=on_host),
        optim=optim,
        grad_clip=1.0,
        total_steps=1,
        device=mesh.device,
    )


def update(learner: Learner, tokens: int) -> None:
    """Forward and backward of two micro-batches, one step."""
    with learner.updating() as module:
        for number in range(2):
            generator = torch.Generator().manual_seed(number)
            ids = torch.randint(3, 49152, (1, tokens), generator=generator)
            found = module(
                input_ids=ids.to(learner.device),
                position_ids=torch.arange(tokens, device=learner.device)[None],
                positions=torch.arange(tokens - tokens // 4, tokens, device=learner.device),
                labels=ids[0, -(tokens // 4) :].to(learner.device),
                cu_seqlens=torch.tensor([0, tokens]),
            )
            found.logprobs.mean().backward()
        learner.clip_gradients()
        learner.step()


def pretends(setting: dict[str, Any], device: torch.device) -> bool:
    """Whether a CPU takes the part of a device, so that something can leave it."""
    return bool(setting.get("on_host")) and device.type == "cpu"


def mib(learner: Learner, tokens: int, *, leaves: bool) -> float:
    """Peak of an update that is not the first; `leaves`: moments are on the host."""
    state = [x for s in learner.optimizer.state.values() for x in s.values()]
    with PeakTracker(learner.device) as tracker:
        tracker.watch([*learner.module.parameters(), *([] if leaves else state)])
        update(learner, tokens)
    return tracker.peak_bytes / 2**20


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.bench_memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    works, peaks = {}, {}
    with init_distributed(device), tempfile.TemporaryDirectory() as name:
        folder = save_smollm2_shape(Path(name), layers=args.layers)
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), device)
        for label, setting in SETTINGS.items():
            leaves = pretends(setting, device)
            with fake_device() if leaves else nullcontext():
                learner = make_learner(folder, mesh, **setting)
                update(learner, 16)
                peaks[label] = mib(learner, args.tokens, leaves=leaves)
            works[label] = partial(update, learner, args.tokens)
        times = fastest(works, device, args.repeats)
    first = next(iter(SETTINGS))
    sys.stdout.write("| Setting | seconds | time | MiB | memory |\n")
    sys.stdout.write("| --- | --: | --: | --: | --: |\n")
    for label in SETTINGS:
        sys.stdout.write(
            f"| `{label}` | {times[label]:.1f} | {times[label] / times[first]:.2f} "
            f"| {peaks[label]:.0f} | {peaks[label] / peaks[first]:.2f} |\n"
        )


if __name__ == "__main__":
    main()
