"""SGLang in the ranks against SGLang in processes of its own, one after the other in one run.

    python -m tests.benchmarks.bench_engine_process --ranks 2 --tp 2 \
        --model models/smollm2-135m-instruct

For each kind: seconds from nothing imported of SGLang to an engine that has given its memory back;
the shortest of several weight syncs when nothing has to be compiled or verified any more; tokens
per second of a whole batch, the most of several, and milliseconds that cores have worked for each,
the fewest; host memory of the ranks and of all processes that they have started, shared pages once,
while generating. Without --model: random weights in the shape of SmolLM2-135M with 8 layers, and as
many heads as two ranks can share.

Beside other programs the tokens per second of the kinds are not to be compared: Linux gives every
session of processes an equal share of the cores, and SGLang's own processes are one of their own.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ppo.engines.contract import Request, SamplingParams
from ppo.run.signals import descendants
from tests.distributed import run_distributed
from tests.ppo.engines.drive import drive, generate
from tests.ppo.engines.sglang.session import Session

KINDS = ("host", "rank")
SYNCS = 5
GENERATIONS, SEQUENCES, NEW_TOKENS = 3, 16, 48
GIB = 1024**3


class Figures(NamedTuple):
    """Of one kind."""

    ready_s: float
    sync_s: float
    tokens_per_s: float
    host_gib: float
    processes: int
    core_ms: float
    """a token"""


def save_model(folder: Path) -> Path:
    """Random float32 weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def measure(rank: int, world_size: int, folder: str, kind: str, tp: int) -> dict[str, float]:
    """On every rank; the figures of the leaders count."""
    dist.barrier()
    started = time.monotonic()
    session = Session(
        rank, world_size, folder, kind, tp=tp, verify_weights="never", max_num_seqs=SEQUENCES
    )
    engine = session.engine
    drive(engine.start())
    ready = time.monotonic() - started
    syncs = []
    for _ in range(SYNCS):
        dist.barrier()
        started = time.monotonic()
        drive(engine.wake())
        syncs.append(time.monotonic() - started)
        engine.release()
    drive(engine.wake())
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    pids = [os.getpid(), *descendants(os.getpid())]
    rates, worked = [], []
    for _ in range(GENERATIONS):
        dist.barrier()
        before = sum(map(core_seconds, pids))
        requests = [Request(i, [5 + i, 7, 9]) for i in range(SEQUENCES)]
        made = drive(generate(engine, requests, params))
        rates.append(made.metrics.get("rollout/tokens_per_s", 0.0) if engine.is_leader else 0.0)
        worked.append(sum(map(core_seconds, pids)) - before)
    dist.barrier()
    held = sum(map(proportional_bytes, pids))
    dist.barrier()
    engine.close()
    found = {"ready": ready, "sync": min(syncs), "rate": max(rates), "held": held}
    return found | {"pids": len(pids), "worked": min(worked)}


def core_seconds(pid: int) -> float:
    """That a process has worked since it began."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def proportional_bytes(pid: int) -> int:
    """Of a process: its own pages, and its share of those that it shares."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def figures(ranks: list[dict[str, float]], engines: int) -> Figures:
    """The slowest rank, all tokens, all memory."""
    return Figures(
        max(r["ready"] for r in ranks),
        max(r["sync"] for r in ranks),
        sum(r["rate"] for r in ranks),
        sum(r["held"] for r in ranks) / GIB,
        int(sum(r["pids"] for r in ranks)),
        1000 * sum(r["worked"] for r in ranks) / (engines * SEQUENCES * NEW_TOKENS),
    )


def main(argv: list[str]) -> int:
    """Print a table; 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.bench_engine_process",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2, help="ranks of one engine")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    options: Any = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or save_model(Path(scratch) / "model")
        print("| Kind | Ready, s | Warm sync, s | Tokens/s | Core ms a token | GiB | Processes |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for kind in KINDS:
            found = figures(
                run_distributed(
                    measure, options.ranks, str(folder), kind, options.tp, timeout_s=600
                ),
                options.ranks // options.tp,
            )
            values = f"{found.ready_s:.1f} | {found.sync_s:.3f} | {found.tokens_per_s:.0f}"
            values += f" | {found.core_ms:.1f} | {found.host_gib:.2f}"
            print(f"| {kind} | {values} | {found.processes} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
