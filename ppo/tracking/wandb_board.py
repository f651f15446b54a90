"""Weights & Biases. WANDB_MODE=offline, WANDB_API_KEY and the like are read by its package."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ppo.tracking.board import SAMPLE_COLUMNS, About, Bins, as_table


class Wandb:
    """One run, which a resume goes on with."""

    def __init__(self, about: About) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._wandb = wandb
        self.run_id = about.run_id or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=about.project,
            name=about.experiment,
            id=self.run_id,
            resume="allow",
            dir=str(about.folder),
            config=dict(about.config),
            settings=wandb.Settings(console="off"),  # the run folder has the logs
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Its steps only go up: those that come again after a resume are there already."""
        self._log(step, values)

    def samples(self, step: int, split: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table."""
        table = self._wandb.Table(columns=[*SAMPLE_COLUMNS], data=as_table(rows))
        self._log(step, {f"samples/{split}": table})

    def histogram(self, step: int, name: str, bins: Bins) -> None:
        """A histogram with our bins."""
        histogram = self._wandb.Histogram(np_histogram=(bins.counts, bins.edges))
        self._log(step, {f"distribution/{name}": histogram})

    def close(self, *, failed: bool) -> None:
        """Send what is left."""
        self._run.finish(exit_code=int(failed))

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        if step >= self._run.step:
            self._run.log(dict(values), step=step)
