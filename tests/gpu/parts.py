"""What a part of tests/gpu.sh is given, and how it is run: in a process of its own, with a limit.

Owns processes, limits and the files of results. Must not know what a part measures. Children are
forked after the imports, which take longer than many parts; the parent never touches a device.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

Row = dict[str, Any]
"""one line of a part's table: names and numbers"""


@dataclass(frozen=True)
class Options:
    """What every part is given."""

    dry: bool
    """tiny shapes, and whatever needs no CUDA on the CPU"""
    folder: Path
    """scratch: models, data and runs; parts share what they find there"""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.dry else torch.device("cuda", 0)

    def pick(self, real: Any, dry: Any) -> Any:
        """A size: the real one, or that of a dry run."""
        return dry if self.dry else real


class Part(NamedTuple):
    """One line of the plan."""

    name: str
    work: Callable[[Options], Iterator[Row]]
    limit_s: float


class Result(NamedTuple):
    """What came of a part: the rows it had yielded are kept, however it ended."""

    name: str
    state: str
    """ok, failed, or out of time"""
    seconds: float
    rows: list[Row]
    error: str = ""


def run_part(part: Part, options: Options, out: Path, limit_s: float) -> Result:
    """Fork, wait, and kill what is left after `limit_s` seconds; its output is in out/NAME.log."""
    rows_file, log = out / f"{part.name}.jsonl", out / f"{part.name}.log"
    rows_file.unlink(missing_ok=True)
    started = time.monotonic()
    child = multiprocessing.get_context("fork").Process(
        target=_child, args=(part, options, rows_file, log)
    )
    child.start()
    child.join(limit_s)
    late = child.is_alive()
    _kill_group(child.pid)
    child.join()
    rows = [json.loads(line) for line in _lines(rows_file)]
    rows_file.unlink(missing_ok=True)
    state, error = "ok", ""
    if late:
        state, error = "out of time", f"ended after {limit_s:.0f} s"
    elif child.exitcode != 0:
        state, error = "failed", (_lines(log) or [f"exit code {child.exitcode}"])[-1]
    return Result(part.name, state, time.monotonic() - started, rows, error)


def _kill_group(pid: int | None) -> None:
    """The child and whatever it has started: it leads a session of its own."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _child(part: Part, options: Options, rows_file: Path, log: Path) -> None:
    os.setsid()
    file, code = log.open("w", encoding="utf-8", buffering=1), 0
    for number in (1, 2):
        os.dup2(file.fileno(), number)
    sys.stdout = sys.stderr = file  # a test's own may lead elsewhere
    try:
        with rows_file.open("w", encoding="utf-8") as rows:
            for row in part.work(options):
                rows.write(json.dumps(row) + "\n")
                rows.flush()
    except BaseException:
        traceback.print_exc()
        code = 1
    file.flush()
    os._exit(code)  # nothing of the parent's is to be ended here


def _lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return [line for line in text.splitlines() if line.strip()]
