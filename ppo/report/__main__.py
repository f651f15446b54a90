"""What a run has done, as one HTML file, or as text in a terminal while it runs.

    python -m ppo.report runs/ppo/first --out report.html
    python -m ppo.report runs/ppo/first runs/ppo/second --out both.html    # side by side
    python -m ppo.report runs/ppo/first --watch                            # in a terminal
    python -m ppo.report runs/ppo/first --summary                          # how it has ended

The file needs no network, no server and no other file: copy it with scp, open it in a browser.
Everything is read from the run folder (metrics.jsonl, histograms.jsonl, samples/, config.yaml).
"""

import argparse
import logging
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ppo.report.page import build_page
from ppo.report.record import NoRun, load_records
from ppo.report.summary import summary
from ppo.report.watch import dashboard, watch

logger = logging.getLogger("ppo.report")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 where a folder holds no run or the file cannot be written."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        if options.watch:
            return _watch(options)
        if options.summary:
            print("\n\n".join(summary(run) for run in options.runs))
            return 0
        started = time.monotonic()
        page = build_page(load_records(options.runs))
        _write(options.out, page)
        size, seconds = len(page.encode()) / 1000, time.monotonic() - started
        logger.info("wrote %s: %.0f kB in %.1f s", options.out, size, seconds)
        return 0
    except NoRun as error:
        logger.error("%s", error)
        return 2
    except OSError as error:
        logger.error("%s: cannot be written: %s", options.out, error.strerror)
        return 2


def _write(path: Path, page: str) -> None:
    """Beside its place and renamed: a browser may be reading the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        beside.write_text(page, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _watch(options: argparse.Namespace) -> int:
    if len(options.runs) > 1:
        raise NoRun("--watch shows one run; without it several stand side by side")
    if not sys.stdout.isatty():  # once, into a file or a pipe
        print(dashboard(options.runs[0], width=100, height=50))
        return 0
    try:
        watch(options.runs[0], every_s=options.every)
    except KeyboardInterrupt:
        print()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ppo.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="the HTML file")
    parser.add_argument("--watch", action="store_true", help="text, anew every few seconds")
    parser.add_argument("--summary", action="store_true", help="text: outcome and validations")
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="seconds; of --watch")
    return parser


if __name__ == "__main__":
    sys.exit(main())
