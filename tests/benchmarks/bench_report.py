"""Time and size of the report of long runs.

    python -m tests.benchmarks.bench_report [--steps 2000] [--runs 2]

Made-up runs of about 64 MB of metrics and samples each: 1,000 tokens with their values in each of
four samples a step, 110 metrics, 64 validation samples every 100 steps.
"""

import argparse
import tempfile
import time
from pathlib import Path

from ppo.report.page import build_page
from ppo.report.record import load_records
from tests.ppo.report.made_run import make_run


def main() -> None:
    """Print megabytes read, seconds and size, of one run and of all side by side."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.bench_report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="folder to leave the report of all runs in")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = [
            make_run(Path(scratch) / f"run{i}", steps=options.steps, num_tokens=300, seed=i)
            for i in range(options.runs)
        ]
        for chosen in (folders[:1], folders):
            files = (path for folder in chosen for path in folder.rglob("*") if path.is_file())
            read_mb = sum(path.stat().st_size for path in files) / 1e6
            started = time.perf_counter()
            page = build_page(load_records(chosen))
            seconds = time.perf_counter() - started
            print(
                f"{len(chosen)} run(s) of {options.steps} steps, {read_mb:.0f} MB: "
                f"{seconds:.1f} s, {len(page.encode()) / 1e6:.2f} MB"
            )
            if options.keep:
                (options.keep / f"report{len(chosen)}.html").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
