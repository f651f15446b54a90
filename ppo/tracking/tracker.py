"""Where a step's numbers go: console line, JSON lines, TensorBoard, samples.

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
from typing import TYPE_CHECKING, Any

from ppo.files import new_file, new_numbered
from ppo.tracking.step_file import StepFile, json_line, lines_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

LARGEST_BIN = 1e20
"""TensorBoard's histograms end there"""
NUM_BINS = 32
"""of a line of histograms.jsonl"""
UNDONE = ("guard/rolled_back", 1.0)
"""in the rows of steps that a rollback has undone"""
_SAMPLES = re.compile(r"(?:train|val(?:-[A-Za-z0-9_-]+)?)_(\d{8,})\.jsonl")


class Tracker:
    """Writes steps and samples. On ranks where it is not enabled every method does nothing.

    with Tracker(run.record, enabled=rank == 0, loggers=config.trainer.logger) as tracker:
        tracker.truncate(step)      # once, after the start or the resume
        tracker.log(step, values)   # once a step; again after a resume, with what was left to do

    A disk that is full ends no training: it is said once, and rows of metrics.jsonl wait for the
    next one.
    """

    def __init__(self, folder: Path, *, enabled: bool, loggers: Collection[str]) -> None:
        """`loggers`: any of console, jsonl, tensorboard."""
        self._folder = folder
        self._loggers = frozenset(loggers) if enabled else frozenset()
        self._writes_samples = enabled
        self._resumed_at: int | None = None
        self._purge_step: int | None = None
        self._writer: SummaryWriter | None = None
        self._metrics = StepFile(folder / "metrics.jsonl")
        self._histograms = StepFile(folder / "histograms.jsonl")
        self._said: set[str] = set()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._writer is not None:
            with self._saying("tensorboard"):
                self._writer.close()
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
        self._resumed_at, self._purge_step = after, last + 1
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
        with self._saying("tensorboard"):
            if writer := self._tensorboard():
                for name, value in values.items():
                    writer.add_scalar(name, value, step)
                writer.flush()

    def mark_undone(self, after: int) -> None:
        """Set guard/rolled_back in the rows of all steps after that one."""
        if "jsonl" in self._loggers:
            with self._saying(self.metrics_file.name):
                self._metrics.mark(after, UNDONE)
        with self._saying("tensorboard"):
            if writer := self._tensorboard():
                writer.add_scalar(*UNDONE, after)

    @contextmanager
    def _saying(self, what: str) -> Iterator[None]:
        """A file that cannot be written is a warning, once, and not the end of the training."""
        try:
            yield
        except OSError as error:
            if what == "tensorboard":
                self._writer = None  # its thread has ended; the next step begins a new file
            if what not in self._said:
                self._said.add(what)
                logger.warning("%s cannot be written (said once): %s", self._folder / what, error)

    def samples(
        self, step: int, rows: Sequence[Mapping[str, Any]], *, split: str, num_text: int
    ) -> None:
        """Write samples/SPLIT_STEP.jsonl, and the first `num_text` rows as TensorBoard text.

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
        with self._saying("tensorboard"):
            if num_text and (writer := self._tensorboard()):
                text = "\n\n---\n\n".join(_as_markdown(row) for row in rows[:num_text])
                writer.add_text(f"samples/{split}", text.encode("utf-8", "replace").decode(), step)

    def histogram(self, step: int, name: str, values: Sequence[float]) -> None:
        """Write a distribution to histograms.jsonl and TensorBoard, without values beyond
        LARGEST_BIN."""
        finite = [value for value in values if abs(value) < LARGEST_BIN]
        if finite and "jsonl" in self._loggers:
            with self._saying(self._histograms.path.name):
                self._histograms.add({"step": step, "name": name} | counted(finite))
        with self._saying("tensorboard"):
            if finite and (writer := self._tensorboard()):
                import numpy as np

                writer.add_histogram(name, np.asarray(finite), step)

    def _tensorboard(self) -> SummaryWriter | None:
        if self._writer is None and "tensorboard" in self._loggers:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, one rank needs it

            self._writer = SummaryWriter(
                str(self._folder / "tensorboard"), purge_step=self._purge_step
            )
        return self._writer


def counted(values: Sequence[float]) -> dict[str, Any]:
    """{"low", "high", "counts"}: how many lie in each of NUM_BINS equal bins between both."""
    low, high, counts = min(values), max(values), [0] * NUM_BINS
    width = (high - low) / NUM_BINS or 1.0
    for value in values:
        counts[min(NUM_BINS - 1, int((value - low) / width))] += 1
    return {"low": low, "high": high, "counts": counts}


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


def _as_markdown(row: Mapping[str, Any]) -> str:
    """One sample as TensorBoard shows text: indented blocks, so that nothing is interpreted."""
    blocks = [f"**score** {row['score']}"] if "score" in row else []
    for key in ("prompt", "response", "ground_truth"):
        if key in row:
            indented = "\n".join("    " + line for line in str(row[key]).splitlines())
            blocks.append(f"**{key}**\n\n{indented}")
    return "\n\n".join(blocks)
