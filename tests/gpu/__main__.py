"""All measurements on one GPU, in order of value.

    bash tests/gpu.sh [--dry] [--out DIR] [PART ...]

Needs torch, transformers, pyarrow, pyyaml, tensorboard and pytest, and no network. Each part runs
in a process of its own with its own time limit, and all within --limit_s; after each one
DIR/results.json and DIR/results.md hold what is known so far. Exit code 0 when every part is ok.

--dry runs every part with tiny shapes on the CPU, CUDA or not: nothing is measured, and a typing
error is found before a GPU is paid for.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers
from transformers import (  # noqa: F401  children are forked when this is done
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from tests.gpu.agreement import compare_devices
from tests.gpu.iteration import measure_iteration
from tests.gpu.kernels import measure_generation, measure_head, run_gpu_tests
from tests.gpu.parts import Options, Part, Result, Row, run_part
from tests.gpu.updates import count_syncs, measure_compiled, measure_updates


def describe_machine(options: Options) -> Iterator[Row]:
    """What the figures were measured on."""
    row: Row = {"torch": torch.__version__, "transformers": transformers.__version__}
    row |= {"python": platform.python_version(), "cores": os.cpu_count()}
    if not options.dry:
        if not torch.cuda.is_available():
            raise SystemExit("torch sees no CUDA device: use --dry for a trial without one")
        device = torch.cuda.get_device_properties(0)
        row |= {"device": device.name, "gib": round(device.total_memory / 2**30, 1)}
        row |= {"cuda": torch.version.cuda, "capability": f"{device.major}.{device.minor}"}
    yield row


PARTS = [
    Part("machine", describe_machine, 15),
    Part("tests", run_gpu_tests, 100),
    Part("agreement", compare_devices, 40),
    Part("updates", measure_updates, 100),
    Part("head", measure_head, 20),
    Part("generation", measure_generation, 40),
    Part("iteration", measure_iteration, 60),
    Part("syncs", count_syncs, 25),
    Part("compiled", measure_compiled, 75),
]


def table(results: Sequence[Result]) -> str:
    """Markdown: one table of parts, then one of the rows of each."""
    lines = ["| part | state | seconds |", "| --- | --- | --: |"]
    for result in results:
        why = f": {result.error}" if result.error else ""
        lines.append(f"| {result.name} | {result.state}{why} | {result.seconds:.1f} |")
    for result in results:
        if result.rows:
            names = list(dict.fromkeys(name for row in result.rows for name in row))
            lines += ["", f"### {result.name}", "", "| " + " | ".join(names) + " |"]
            lines.append("|" + " --- |" * len(names))
            for row in result.rows:
                lines.append("| " + " | ".join(str(row.get(name, "")) for name in names) + " |")
    return "\n".join(lines) + "\n"


def write(results: Sequence[Result], out: Path, dry: bool) -> None:
    """results.json and results.md, whole after each part."""
    found = {"date": time.strftime("%Y-%m-%d"), "dry": dry}
    found |= {"parts": [result._asdict() for result in results]}
    (out / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (out / "results.md").write_text(table(results), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bash tests/gpu.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="only these; default: all")
    parser.add_argument("--dry", action="store_true", help="tiny shapes, on the CPU")
    parser.add_argument("--out", type=Path, help="folder of the results; default: a new one")
    parser.add_argument("--limit_s", type=float, default=470.0, help="for all parts together")
    args = parser.parse_args(argv)
    known = [part.name for part in PARTS]
    if unknown := set(args.parts) - set(known):
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    out = args.out or Path(tempfile.mkdtemp(prefix="gpu_results_"))
    out.mkdir(parents=True, exist_ok=True)
    end, results = time.monotonic() + args.limit_s, []
    with tempfile.TemporaryDirectory() as scratch:
        options = Options(args.dry, Path(scratch))
        for part in PARTS:
            if args.parts and part.name not in (*args.parts, "machine"):
                continue
            # a trial may run beside others on few cores, and has nothing to save
            limit = min(part.limit_s * (10 if args.dry else 1), end - time.monotonic())
            if limit <= 0:
                result = Result(part.name, "out of time", 0.0, [], "no time was left")
            else:
                result = run_part(part, options, out, limit)
            results.append(result)
            write(results, out, args.dry)
            sys.stdout.write(
                f"{part.name}: {result.state} ({result.seconds:.1f} s) {result.error}\n"
            )
            sys.stdout.flush()
            if part.name == "machine" and result.state != "ok":
                break
    sys.stdout.write(f"\n{table(results)}\n{out / 'results.json'}\n")
    return 0 if all(result.state == "ok" for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
