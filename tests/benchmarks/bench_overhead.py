"""The share of an iteration that is neither generation, forward, backward, optimizer nor exchange.

    python -m tests.benchmarks.bench_overhead [--prompts 16] [--new_tokens 64] [--iterations 2]

PPO with critic and reference on a model in SmolLM2-135M's shape, one process, embedded engine, a
built-in scorer. Overhead is what timing_s/step has besides the phases of the models (scoring, whose
turn it is, advantages, metrics), and of these phases what the host does to lay micro-batches out.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import train_ppo
from ppo.batch.packing import Batcher
from ppo.config import load_config
from ppo.run.run import Run
from ppo.update import steps
from sharding.mesh import build_mesh, init_distributed
from tests.benchmarks.measure import save_smollm2_shape
from tests.gpu.shapes import tokenizer_of

TARGET = 0.03
MODEL_PHASES = ("gen", "old_log_prob", "ref", "values", "update_critic", "update_actor")
CPU = torch.device("cpu")


@contextmanager
def timing_layout() -> Iterator[list[float]]:
    """Seconds of each call that plans, makes or weighs micro-batches."""
    taken: list[float] = []

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = work(*args, **options)
            taken.append(time.perf_counter() - started)
            return result

        return run

    with (
        patch.object(Batcher, "make", timed(Batcher.make)),
        patch.object(Batcher, "plan", timed(Batcher.plan)),
        patch.object(steps, "token_weights", timed(steps.token_weights)),
        patch.object(steps, "move", timed(steps.move)),
    ):
        yield taken


def run_iterations(folder: Path, args: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """Rows of the metrics, and seconds of laying out in all of them."""
    save_smollm2_shape(folder / "model")
    tokenizer_of(49152).save_pretrained(folder / "model")
    sizes = {
        "model.path": folder / "model",
        "data.train_files": "tiny",
        "data.train_batch_size": args.prompts,
        "data.max_prompt_length": 32,
        "data.max_response_length": args.new_tokens,
        "actor.ppo_mini_batch_size": args.prompts // 2,
        "rollout.engine": "torch",
        "rollout.ignore_eos": "true",
        "trainer.device": "cpu",
        "trainer.total_training_steps": args.iterations,
        "trainer.save_freq": -1,
        "trainer.default_local_dir": folder / "run",
        "reward.num_workers": 1,
    }
    config = load_config(None, [f"{key}={value}" for key, value in sizes.items()])
    mesh = build_mesh(config.dims(1, 1), CPU)
    with timing_layout() as taken, Run(config, mesh, command=["bench_overhead"]) as run:
        train_ppo.train(config, run)
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], sum(taken)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.bench_overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, init_distributed(CPU):
        rows, layout = run_iterations(Path(folder), args)
    total = sum(row["timing_s/step"] for row in rows)
    models = sum(row.get(f"timing_s/{name}", 0.0) for row in rows for name in MODEL_PHASES)
    share = (total - models + layout) / total
    sys.stdout.write(
        f"{len(rows)} iterations, {args.prompts} prompts, {args.new_tokens} new tokens: "
        f"{total:.1f} s\nbetween the models' phases {total - models:.3f} s, laying out "
        f"{layout:.3f} s\noverhead {100 * share:.2f} % (target below {100 * TARGET:.0f} %)\n"
    )


if __name__ == "__main__":
    main()
