"""Files of a run folder that are not metrics: configuration, starts, status, logs.

Owns their names and formats. Must not know what a run does, or other ranks.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal

from ppo.errors import InputError
from ppo.files import new_numbered, replace_text

logger = logging.getLogger(__name__)

Outcome = Literal["running", "finished", "preempted", "stopped", "interrupted", "failed"]
LOCK_PATIENCE_S = {True: 10.0, False: 120.0}
"""how long a start waits for a job on this host, or on another, to be gone: a file server keeps the
locks of a node that has crashed for a while"""
RESULTS = ("checkpoints", "metrics.jsonl", "histograms.jsonl", "samples", "tensorboard", "trackers")
RECORD = (*RESULTS, "config.yaml", "starts.jsonl", "status.json", "profile")
"""the files of a run that belong together; logs are of processes, and go on"""
LONGEST_REASON = 2000
"""letters that fit into the block that status.json has on the disk already"""
OUR_LOGGERS = ("__main__", "train_ppo", "rollout", "ppo", "sharding")


def write_status(
    folder: Path,
    state: Outcome,
    *,
    step: int,
    reason: str,
    alarms: Mapping[str, str] | None = None,
    startup_s: Mapping[str, float] | None = None,
) -> None:
    """Replace status.json: {"state", "step", "reason"}; launch scripts requeue from it.

    alarms: what is the matter, by metric: a fourth entry, where there is anything.
    startup_s: seconds of the parts of the start: another, likewise.

    On a disk that is full the file that is there is written over: it has its block.
    """
    path = folder / "status.json"
    status: dict[str, Any] = {"state": state, "step": step, "reason": reason}
    more = {"alarms": alarms, "startup_s": startup_s}
    status |= {name: dict(entry) for name, entry in more.items() if entry}
    try:
        replace_text(path, json.dumps(status) + "\n")
    except OSError:
        if not path.is_file():
            raise
        least = {name: status[name] for name in ("state", "step")}
        content = json.dumps(least | {"reason": reason[:LONGEST_REASON]}) + "\n"
        with path.open("r+b") as file:
            file.write(content.encode())
            file.truncate()


def read_status(folder: Path) -> dict[str, Any] | None:
    """What status.json holds; None where there is none, or none of ours."""
    try:
        status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_ours = isinstance(status, dict) and isinstance(status.get("step"), int) and "state" in status
    return status if is_ours else None


def record_start(folder: Path, *, command: Sequence[str], world_size: int, restart: int) -> None:
    """Append this start to starts.jsonl: time, command line, git revision, ranks, versions."""
    import torch

    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(command),
        "git_revision": git_revision(Path(__file__).resolve().parent),
        "world_size": world_size,
        "restart": restart,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }
    with (folder / "starts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(start) + "\n")


def git_revision(folder: Path) -> str | None:
    """Commit of the working tree, with "+changes" where files differ; None outside of git."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+changes" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    result = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=20,
    )
    return result.stdout.strip()


def lock_folder(folder: Path, *, patience_s: float | None = None) -> IO[str]:
    """Keep other jobs out of the folder as long as the returned file is open.

    The kernel lets go of it when the process ends, however that happens. Raises InputError naming
    the job that holds it; on a file system without locks this only warns.
    """
    file = (folder / "lock").open("a+", encoding="utf-8")
    started, here = time.monotonic(), f"on {socket.gethostname()}"
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip()
        except OSError as error:
            logger.warning("%s cannot be locked (%s): start no second job there", folder, error)
            return file
        limit = LOCK_PATIENCE_S[f"{here} " in holder] if patience_s is None else patience_s
        if time.monotonic() - started >= limit:
            raise InputError(
                f"run folder {folder} is in use by {holder}: end that job first, or set "
                "trainer.experiment_name or trainer.default_local_dir"
            )
        time.sleep(0.2)
    file.truncate(0)
    file.write(f"process {os.getpid()} {here} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    return file


def set_aside(folder: Path, *, also: Sequence[str] = ()) -> None:
    """Move the record of an earlier run into a folder of its own, whole: nothing of it is lost.

    That folder is a run's folder as this one was; nothing happens where no run has left a result,
    nor anything of `also`.
    """
    if not any((folder / name).exists() for name in (*RESULTS, *also)):
        return
    old = new_numbered(folder, "old")
    for name in (*RECORD, *also):
        if (folder / name).exists():
            (folder / name).rename(old / name)
    logger.warning("what an earlier run left in %s is now in %s", folder, old)


def add_log_handlers(folder: Path, rank: int) -> list[logging.StreamHandler]:
    """Log to the console (rank 0: INFO, others: WARNING) and everything to logs/rank_0000.log, the
    last handler.

    A warning that is the same on every rank is logged with extra={"every_rank": True}: the console
    has it from rank 0 only.

    Returns the handlers; `remove_log_handlers` takes them away again.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    console = logging.StreamHandler()
    console.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    console.addFilter(lambda record: rank == 0 or not getattr(record, "every_rank", False))
    file = _LogFile(folder / "logs" / f"rank_{rank:04d}.log", encoding="utf-8")
    layout = logging.Formatter(
        f"%(asctime)s [rank {rank}] %(levelname)s %(name)s: %(message)s", "%m-%d %H:%M:%S"
    )
    for handler in (console, file):
        handler.setFormatter(layout)
        logging.getLogger().addHandler(handler)
    for name in OUR_LOGGERS:
        logging.getLogger(name).setLevel(logging.DEBUG)
    return [console, file]


class _LogFile(logging.FileHandler):
    """On a disk that is full the console goes on alone, without a traceback for each line."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):  # of the lines that found no room
            super().close()


def remove_log_handlers(handlers: Sequence[logging.StreamHandler]) -> None:
    """Undo `add_log_handlers`."""
    for handler in handlers:
        logging.getLogger().removeHandler(handler)
        handler.close()
