"""Where a step's numbers go: console line, JSON lines, samples, and trackers.

Owns formats and files under the run folder; writes on one rank only. Must not know how a number
came about (ppo/metrics.py) or what it means.
"""

from __future__ import annotations

import logging
import math
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ppo.files import new_file, new_numbered, replace_text
from ppo.tracking.board import About, Background, Bins, Board
from ppo.tracking.mlflow_board import Mlflow
from ppo.tracking.step_file import StepFile, json_line, lines_of
from ppo.tracking.swanlab_board import Swanlab
from ppo.tracking.tensorboard import TensorBoard
from ppo.tracking.trackio_board import Trackio
from ppo.tracking.wandb_board import Wandb

logger = logging.getLogger(__name__)

LARGEST_BIN = 1e20
"""TensorBoard's histograms end there"""
NUM_BINS = 32
"""of a line of histograms.jsonl"""
UNDONE = ("guard/rolled_back", 1.0)
"""in the rows of steps that a rollback has undone"""
TRACKERS = {"wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow, "swanlab": Swanlab}
"""of trainer.logger, each the name of the package that it needs"""
_SAMPLES = re.compile(r"(?:train|val(?:-[A-Za-z0-9_-]+)?)_(\d{8,})\.jsonl")


class Tracker:
    """Writes steps and samples. On ranks where it is not enabled every method does nothing.

    with Tracker(run.record, enabled=rank == 0, loggers=config.trainer.logger) as tracker:
        tracker.truncate(step)      # once, after the start or the resume
        tracker.log(step, values)   # once a step; again after a resume, with what was left to do

    A disk that is full ends no training: it is said once, and rows of metrics.jsonl wait for the
    next one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        enabled: bool,
        loggers: Collection[str],
        about: About | None = None,
        good_ends: tuple[type[BaseException], ...] = (),
    ) -> None:
        """`loggers`: any of console, jsonl, tensorboard, and TRACKERS. `about`: for these.
        `good_ends`: exceptions by which a run ends that has not failed."""
        self._good_ends = good_ends
        self._folder = folder
        self._about = about or About(folder, "ppo", folder.name)
        self._loggers = frozenset(loggers) if enabled else frozenset()
        self._writes_samples = enabled
        self._resumed_at: int | None = None
        self._boards: dict[str, Board] = {}
        self._metrics = StepFile(folder / "metrics.jsonl")
        self._histograms = StepFile(folder / "histograms.jsonl")
        self._said: set[str] = set()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        failed = kind is not None and not issubclass(kind, self._good_ends)
        for name, board in self._boards.items():
            with self._saying(name):
                board.close(failed=failed)
        for file in (self._metrics, self._histograms):
            if file.waiting:
                with self._saying(file.path.name):
                    file.write_waiting()
            if file.waiting:
                logger.error("%s lacks the last %d rows", file.path, len(file.waiting))

    @property
    def metrics_file(self) -> Path:
        """One JSON object a step: {"step": 3, NAME: value, ...}; not finite values are null."""
        return self._metrics.path

    def truncate(self, after: int | None, *, keep: bool = False) -> None:
        """Forget what an earlier start wrote after a step; None forgets everything.

        Called once before the first `log`. A row that was cut off by a crash goes too. With `keep`
        what is forgotten is set aside in a new folder; so are rows that are no steps, always.
        """
        if not self._writes_samples:
            return
        last = -1 if after is None else after
        self._resumed_at = after
        self._about = self._about._replace(first_step=last + 1)
        if after is None or keep:  # another run than the trackers have
            shutil.rmtree(self._folder / "trackers", ignore_errors=True)
        files = {file: list(lines_of(file.read())) for file in (self._metrics, self._histograms)}
        alien = [(f, line) for f, lines in files.items() for line in lines if line.step is None]
        is_later = any((line.step or 0) > last for lines in files.values() for line in lines)
        later = [path for path, step in self._sample_files() if step > last]
        aside = None
        if alien or (keep and (is_later or later)):
            aside = new_numbered(self._folder, "old")
            for file in files:
                if file.path.exists():
                    shutil.copy2(file.path, aside)
            what = f"metrics and samples after step {last}"
            if alien:
                file, line = alien[0]
                what = (
                    f"{file.path}: row {line.number} is no step of a run and left out; the file as "
                    "it was"
                )
            logger.warning("%s: now in %s", what, aside)
        for file, lines in files.items():
            kept = [x.content for x in lines if x.step is not None and x.step <= last]
            file.rewrite(b"".join(kept))
        for path in later:
            if keep and aside is not None:
                (aside / "samples").mkdir(exist_ok=True)
                path.rename(aside / "samples" / path.name)
            else:
                path.unlink()

    def _sample_files(self) -> list[tuple[Path, int]]:
        """Those that `samples` has written, with their steps; what else lies there is not ours."""
        folder = self._folder / "samples"
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        named = [(path, _SAMPLES.fullmatch(path.name)) for path in files]
        return [(path, int(match[1])) for path, match in named if match and path.is_file()]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one step everywhere; to be called once for each step.

        What a resumed run logs of the step that it goes on from is added to that step's row.
        """
        if "console" in self._loggers:
            logger.info("%s", console_line(step, values))
        if "jsonl" in self._loggers:
            finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
            with self._saying(self.metrics_file.name):
                write = self._metrics.amend if step == self._resumed_at else self._metrics.add
                write({"step": step} | finite)
        for name in self._board_names:
            with self._saying(name):
                self._board(name).log(step, values)

    @property
    def _board_names(self) -> list[str]:
        return [name for name in ("tensorboard", *TRACKERS) if name in self._loggers]

    def _board(self, name: str) -> Board:
        """The board of that name; begun when it is first needed, after `truncate`."""
        if name not in self._boards:
            if name == "tensorboard":
                self._boards[name] = TensorBoard(self._about)
            else:
                self._boards[name] = self._in_background(name)
        return self._boards[name]

    def _in_background(self, name: str) -> Board:
        file = self._folder / "trackers" / name
        known = file.read_text(encoding="utf-8").strip() if file.is_file() else None
        about = self._about._replace(run_id=known)
        return Background(
            name, lambda: TRACKERS[name](about), lambda run_id: replace_text(file, run_id + "\n")
        )

    def mark_undone(self, after: int) -> None:
        """Set guard/rolled_back in the rows of all steps after that one."""
        if "jsonl" in self._loggers:
            with self._saying(self.metrics_file.name):
                self._metrics.mark(after, UNDONE)
        for name in self._board_names:
            with self._saying(name):
                self._board(name).log(after, dict([UNDONE]))

    @contextmanager
    def _saying(self, what: str) -> Iterator[None]:
        """A file that cannot be written is a warning, once, and not the end of the training."""
        try:
            yield
        except OSError as error:
            self._boards.pop(what, None)  # TensorBoard's thread has ended: begun anew, a new file
            if what not in self._said:
                self._said.add(what)
                logger.warning("%s cannot be written (said once): %s", self._folder / what, error)

    def samples(
        self, step: int, rows: Sequence[Mapping[str, Any]], *, split: str, num_text: int
    ) -> None:
        """Write samples/SPLIT_STEP.jsonl, and the first `num_text` rows to the trackers.

        Args:
            rows: JSON-able, one sample each; "prompt", "response" and "score" are shown.
            split: train, val or val-NAME.
        """
        if not self._writes_samples or not rows:
            return
        with (
            self._saying("samples"),
            new_file(self._folder / "samples" / f"{split}_{step:08d}.jsonl") as beside,
        ):
            beside.write_bytes(b"".join(map(json_line, rows)))
        for name in self._board_names if num_text else ():
            with self._saying(name):
                self._board(name).samples(step, split, rows[:num_text])

    def histogram(self, step: int, name: str, values: Sequence[float]) -> None:
        """Write a distribution to histograms.jsonl and the trackers, without values beyond
        LARGEST_BIN."""
        finite = [value for value in values if abs(value) < LARGEST_BIN]
        if not finite or not self._loggers:
            return
        bins = counted(finite)
        if "jsonl" in self._loggers:
            row = {"low": bins.low, "high": bins.high, "counts": bins.counts}
            with self._saying(self._histograms.path.name):
                self._histograms.add({"step": step, "name": name} | row)
        for board in self._board_names:
            with self._saying(board):
                self._board(board).histogram(step, name, bins)


def counted(values: Sequence[float]) -> Bins:
    """How many lie in each of NUM_BINS equal bins between the smallest and the largest."""
    low, high, counts = min(values), max(values), [0] * NUM_BINS
    width = (high - low) / NUM_BINS or 1.0
    for value in values:
        counts[min(NUM_BINS - 1, int((value - low) / width))] += 1
    return Bins(low, high, counts, values)


def console_line(step: int, values: Mapping[str, float]) -> str:
    """The step as one line; parts whose metrics are missing are left out."""
    parts = [f"step {step}"]
    for label, name, form in (
        ("reward", "critic/score/mean", "{:.3f}"),
        ("kl", "actor/ref_kl", "{:.4f}"),
        ("ppo_kl", "actor/ppo_kl_k3", "{:.4f}"),
        ("clip", "actor/pg_clipfrac", "{:.3f}"),
        ("len", "response_length/mean", "{:.0f}"),
    ):
        if name in values:
            parts.append(f"{label} {form.format(values[name])}")
    for name, value in values.items():
        if name.startswith("val-core/"):
            parts.append(f"val {name.removeprefix('val-core/')} {value:.3f}")
    if "timing_s/step" in values:
        phases = [f"{p} {values[f'timing_s/{p}']:.1f}" for p in ("gen", "reshard", "update_actor")
                  if f"timing_s/{p}" in values]  # fmt: skip
        parts.append(
            f"{values['timing_s/step']:.1f}s" + (f" ({' '.join(phases)})" if phases else "")
        )
    if "perf/throughput" in values:
        rate = values["perf/throughput"]
        parts.append(f"{rate / 1000:.1f}k tok/s/gpu" if rate >= 1000 else f"{rate:.0f} tok/s/gpu")
    if "perf/max_memory_allocated_gb" in values:
        parts.append(f"{values['perf/max_memory_allocated_gb']:.1f} GiB")
    return " | ".join(parts)
