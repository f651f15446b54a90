"""Where a step's numbers go: console line, metrics.jsonl, TensorBoard, samples as JSONL.

Owns formats and files under the run folder; writes on one rank only. Must not know how a number
came about (ppo/metrics.py) or what it means.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

LARGEST_BIN = 1e20
"""TensorBoard's histograms end there"""


class Tracker:
    """Writes steps and samples. On ranks where it is not enabled every method does nothing.

    with Tracker(run.dir, enabled=rank == 0, loggers=config.trainer.logger) as tracker:
        tracker.truncate(step)      # once, after the start or the resume
        tracker.log(step, values)   # once a step
    """

    def __init__(self, folder: Path, *, enabled: bool, loggers: Collection[str]) -> None:
        """`loggers`: any of console, jsonl, tensorboard."""
        self._folder = folder
        self._loggers = frozenset(loggers) if enabled else frozenset()
        self._writes_samples = enabled
        self._purge_step: int | None = None
        self._writer: SummaryWriter | None = None

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._writer is not None:
            self._writer.close()

    @property
    def metrics_file(self) -> Path:
        """One JSON object a step: {"step": 3, NAME: value, ...}; not finite values are null."""
        return self._folder / "metrics.jsonl"

    def truncate(self, step: int) -> None:
        """Forget what an earlier start wrote after `step`; -1 forgets everything.

        Called once before the first `log`. A row that was cut off by a crash goes too.
        """
        if not self._writes_samples:
            return
        self._purge_step = step + 1
        if self.metrics_file.exists():
            lines = self.metrics_file.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if _step_of(line) <= step]
            _replace(self.metrics_file, "".join(kept))
        for file in (self._folder / "samples").glob("*_*.jsonl"):
            if int(file.stem.rpartition("_")[2]) > step:
                file.unlink()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one step everywhere; to be called once for each step."""
        if "console" in self._loggers:
            logger.info("%s", console_line(step, values))
        if "jsonl" in self._loggers:
            row = {"step": step}
            row |= {k: v if math.isfinite(v) else None for k, v in values.items()}
            with self.metrics_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if writer := self._tensorboard():
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            writer.flush()

    def samples(
        self, step: int, rows: Sequence[Mapping[str, Any]], *, split: str, num_text: int
    ) -> None:
        """Write samples/SPLIT_STEP.jsonl, and the first `num_text` rows as TensorBoard text.

        Args:
            rows: JSON-able, one sample each; "prompt", "response" and "score" are shown.
            split: train or val.
        """
        if not self._writes_samples or not rows:
            return
        folder = self._folder / "samples"
        folder.mkdir(exist_ok=True)
        lines = [json.dumps(dict(row), ensure_ascii=False, default=str) + "\n" for row in rows]
        _replace(folder / f"{split}_{step:08d}.jsonl", "".join(lines))
        if num_text and (writer := self._tensorboard()):
            text = "\n\n---\n\n".join(_as_markdown(row) for row in rows[:num_text])
            writer.add_text(f"samples/{split}", text, step)

    def histogram(self, step: int, name: str, values: Sequence[float]) -> None:
        """Write a distribution to TensorBoard; values that its bins do not hold are left out."""
        finite = [value for value in values if abs(value) < LARGEST_BIN]
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


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except ValueError:  # the last row of a run that was killed while it wrote
        return math.inf


def _replace(path: Path, text: str) -> None:
    """Write beside and rename, so that a crash leaves the old file or the new one."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def _as_markdown(row: Mapping[str, Any]) -> str:
    """One sample as TensorBoard shows text: indented blocks, so that nothing is interpreted."""
    blocks = [f"**score** {row['score']}"] if "score" in row else []
    for key in ("prompt", "response", "ground_truth"):
        if key in row:
            indented = "\n".join("    " + line for line in str(row[key]).splitlines())
            blocks.append(f"**{key}**\n\n{indented}")
    return "\n\n".join(blocks)
