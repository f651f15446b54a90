"""Memory and time of the prompts of a run, on the ranks of one node.

    python -m tests.benchmarks.bench_prompts [--rows 200000] [--ranks 2] [--whole 1800000]

Generated rows of about 150 tokens, read, tokenized and shared as a run does it, with the sampler
that draws from them: first half of them, then all. Memory is anonymous memory
(/proc/self/smaps_rollup), beyond what a rank held before; the page cache beside it is the file that
the ranks share. For `whole` rows and a node of 8 ranks memory is extrapolated by the slope.
"""

import argparse
import gc
import json
import os
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch

from ppo.config import Config, load_config
from ppo.data.dataset import PromptDataset
from ppo.models.tiny import build_tiny_model
from ppo.rollout.prompts import load_prompts
from ppo.run.run import Run
from sharding.mesh import build_mesh
from tests.distributed import run_distributed

MIB = 2**20
LETTERS = 144
"""of a prompt: with the chat template about 150 tokens of the tiny tokenizer, one for each"""
NODE = 8
"""ranks of the node that is extrapolated to"""


class Measured(NamedTuple):
    """Of one rank, in MiB and seconds."""

    held: float
    peak: float
    cached: float
    seconds: float
    tokens: float


def write_rows(path: Path, rows: int) -> None:
    """As verl writes them."""
    rng = random.Random(0)
    with path.open("w") as file:
        for index in range(rows):
            text = "".join(rng.choices("abcdefgh ", k=LETTERS))
            row = {
                "data_source": "tiny",
                "prompt": [{"role": "user", "content": text}],
                "ability": "copy",
                "reward_model": {"style": "rule", "ground_truth": text[:20]},
                "extra_info": {"split": "train", "index": index},
            }
            file.write(json.dumps(row) + "\n")


def anonymous_mib() -> float:
    """Anonymous memory of this process."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no Anonymous in smaps_rollup")


def load_and_draw(rank: int, world: int, folder: Path) -> list[Measured]:
    """The few rows, which make what is made once, and then all of them."""
    base = ["data.val_files=[]", "data.max_prompt_length=256", "trainer.device=cpu"]
    base.append(f"trainer.default_local_dir={folder / 'run'}")
    few, all_rows = (
        load_config("ppo_tiny.yaml", [*base, f"data.train_files=[{folder}/{name}.jsonl]"])
        for name in ("few", "all")
    )
    mesh = build_mesh(few.dims(world, world), torch.device("cpu"))
    with Run(few, mesh, command=[]) as run:
        gc.collect()
        before = anonymous_mib()
        found = [measure(config, run, folder / "model", before) for config in (few, all_rows)]
    return found


def measure(config: Config, run: Run, model: Path, before: float) -> Measured:
    """Load the prompts and draw from them; memory beyond `before` MiB."""
    peaks, ended = [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            peaks.append(anonymous_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.monotonic()
    prompts = load_prompts(config, run, model)
    sampler = prompts.sampler(config)
    sampler.next_batch()
    seconds = time.monotonic() - start
    ended.set()
    watcher.join()
    gc.collect()
    held = anonymous_mib()
    assert isinstance(prompts.train, PromptDataset)
    facts = prompts.train.facts
    return Measured(
        held=held - before,
        peak=max(held, *peaks) - before,
        cached=os.fstat(prompts.train.table.file.fileno()).st_size / MIB
        if run.mesh.rank == 0
        else 0,
        seconds=seconds,
        tokens=facts.num_tokens / facts.num_prompts,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.bench_prompts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--whole", type=int, default=1_800_000)
    options = parser.parse_args()
    few = options.rows // 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_tiny_model(folder / "model")
        write_rows(folder / "few.jsonl", few)
        write_rows(folder / "all.jsonl", options.rows)
        found = run_distributed(load_and_draw, options.ranks, folder, timeout_s=600)
    wholes = []
    for rank, (less, more) in enumerate(found):
        slope = max(0.0, more.peak - less.peak) / (options.rows - few)
        wholes.append(more.peak + slope * (options.whole - options.rows))
        for rows, one in ((few, less), (options.rows, more)):
            print(
                f"rank {rank}, {rows} rows of {one.tokens:.0f} tokens: {one.held:.1f} MiB held, "
                f"{one.peak:.1f} MiB at the peak, {one.seconds:.0f} s"
            )
    more, times = found[0][1], options.whole / options.rows
    print(
        f"{options.whole} rows, {NODE} ranks, by the slope: at most "
        f"{wholes[0] + (NODE - 1) * wholes[-1]:.0f} MiB of the node, beside "
        f"{more.cached * times:.0f} MiB of page cache; {more.seconds * times:.0f} s"
    )


if __name__ == "__main__":
    main()
