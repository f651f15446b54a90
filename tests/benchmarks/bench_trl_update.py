"""An actor update here against TRL's GRPO update: same model, same ragged tokens, one run.

    python -m tests.benchmarks.bench_trl_update --trl_python PATH [--sequences 16]
        [--max_length 256] [--layers 30] [--dtype bfloat16] [--repeats 1]

TRL lives in an environment of its own; without --trl_python this prints how to make one. A model in
SmolLM2-135M's shape (float32 masters, gradient checkpointing), sequences of which many are short
and few are long, one optimizer step: loss, entropy, backward, clipping, AdamW on both sides. TRL
takes its default of 8 padded sequences at a time; here a micro-batch holds as many tokens as those
8 rows, packed. One thread and seconds of the core on a CPU; both sides take turns, each warmed up
by one step. The gradient norms of that first step are printed: they show that the work is the same.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from ppo.batch.packing import Batcher
from ppo.batch.samples import RolloutBatch
from ppo.config import Config, load_config
from ppo.data.dataset import Prompt
from ppo.engines.contract import Completion
from ppo.guards.guard import Guard
from ppo.metrics import Metrics
from ppo.models.learner import Learner, make_optimizer
from ppo.models.tiny import build_tiny_tokenizer
from ppo.update import update_actor
from sharding.mesh import Mesh, ParallelDims, build_mesh, init_distributed
from sharding.partition import Budget
from tests.benchmarks.measure import build_for_update, save_smollm2_shape, seconds
from tests.ppo.batches import make_batch, responses

TARGET = 1.3
TRL_ROWS = 8  # sequences of a micro-batch, TRL's default
ENVIRONMENT = """\
TRL is not part of the project; make an environment for it and pass its python:

    python -m venv trl_env && trl_env/bin/pip install trl==1.16.0 torch
    python -m tests.benchmarks.bench_trl_update --trl_python trl_env/bin/python
"""


class Update(NamedTuple):
    """Seconds of the second update, and the gradient norm of the first."""

    seconds: float
    grad_norm: float


def ragged_batch(count: int, longest: int, n: int) -> RolloutBatch:
    """Lengths proportional to (i / count) ** 1.8; the n samples of a prompt share its tokens."""
    g = torch.Generator().manual_seed(0)
    lengths = [max(8, round(longest * (i / count) ** 1.8)) for i in range(1, count + 1)]
    order = torch.randperm(count, generator=g).tolist()
    prompts, completions = [], []
    for uid in range(count // n):
        mine = [lengths[i] for i in order[uid * n : (uid + 1) * n]]
        size = min(mine) // 2
        ids = torch.randint(600, 49152, (size,), generator=g).tolist()
        prompts.append(Prompt(uid, ids, "", None, {}, ""))
        for length in mine:
            response = torch.randint(600, 49152, (length - size,), generator=g).tolist()
            completions.append(Completion(response, [-10.0] * len(response), "stop"))
    batch = make_batch(prompts, completions)
    one_each = torch.randn(count, 1, generator=g)
    batch.advantages = one_each.expand(batch.response_mask.shape) * batch.response_mask
    return batch


def update_here(batch: RolloutBatch, config: Config, folder: Path, mesh: Mesh) -> Update:
    section = config.actor
    module = build_for_update(folder, mesh, section.fsdp)
    actor = Learner(
        name="actor",
        module=module,
        device=mesh.device,
        optimizer=make_optimizer(module, section.optim, mesh.device),
        optim=section.optim,
        grad_clip=section.grad_clip,
        total_steps=1,
    )
    budget = Budget(dp=1, tokens=section.ppo_max_token_len_per_gpu, hidden_size=576)
    batcher = Batcher(mesh=mesh, budget=budget, packed=True)

    def work() -> dict[str, float]:
        metrics = Metrics(mesh.device)
        update_actor(actor, batch, config, batcher, metrics, 1, Guard())
        return metrics.reduce(mesh.host_group)

    first = work()
    return Update(seconds(work, mesh.device), first["actor/grad_norm"])


def prompts_of(batch: RolloutBatch) -> list[list[int]]:
    documents = batch.documents(range(len(batch)))
    lengths = batch.prompt_lengths.tolist()
    return [d[:length].tolist() for d, length in zip(documents, lengths, strict=True)]


def update_in_trl(python: str, batch: RolloutBatch, folder: Path, n: int, dtype: str) -> Update:
    assert batch.advantages is not None
    tokens = folder / "tokens.json"
    tokens.write_text(
        json.dumps(
            {
                "prompt": prompts_of(batch),
                "completion": responses(batch),
                "advantages": batch.advantages[:, 0].tolist(),
                "n": n,
            }
        )
    )
    command = [python, str(Path(__file__).with_name("trl_update.py")), "--model", str(folder)]
    command += ["--tokens", str(tokens), "--dtype", dtype, "--batch", str(TRL_ROWS), "--steps", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return Update(**json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.bench_trl_update",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trl_python")
    parser.add_argument("--sequences", type=int, default=16, help="a multiple of 8")
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    if args.trl_python is None:
        sys.stdout.write(ENVIRONMENT)
        return
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = ragged_batch(args.sequences, args.max_length, TRL_ROWS)
    config = load_config(
        "ppo_tiny.yaml",
        [
            "algorithm.adv_estimator=grpo",
            f"data.train_batch_size={args.sequences // TRL_ROWS}",
            f"actor.ppo_mini_batch_size={args.sequences // TRL_ROWS}",
            f"actor.ppo_max_token_len_per_gpu={TRL_ROWS * args.max_length}",
            f"actor.fsdp.mixed_precision.param_dtype={args.dtype}",
            "actor.optim.lr=1e-6",
        ],
    )
    updates: dict[str, list[Update]] = {"TRL": [], "here": []}
    with tempfile.TemporaryDirectory() as name, init_distributed(device):
        folder = save_smollm2_shape(Path(name), layers=args.layers)
        build_tiny_tokenizer().save_pretrained(folder)
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), device)
        for _ in range(args.repeats):
            updates["TRL"].append(
                update_in_trl(args.trl_python, batch, folder, TRL_ROWS, args.dtype)
            )
            updates["here"].append(update_here(batch, config, folder, mesh))
    lengths = batch.lengths.tolist()
    total = sum(lengths)
    share = total / len(lengths) / max(lengths)
    sys.stdout.write(
        f"{len(lengths)} sequences, {total} tokens, mean/max length {share:.2f}, "
        f"{args.layers} layers, {args.dtype}\n"
    )
    best = {name: min(found) for name, found in updates.items()}
    for name, (taken, norm) in best.items():
        sys.stdout.write(
            f"{name:5}{taken:8.2f} s {total / taken:8.0f} tokens/s   gradient norm {norm:.6g}\n"
        )
    ratio = best["TRL"].seconds / best["here"].seconds
    sys.stdout.write(f"an update is {ratio:.2f} x as fast as TRL's (target {TARGET})\n")


if __name__ == "__main__":
    main()
