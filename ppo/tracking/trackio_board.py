"""Trackio: a local data base (TRACKIO_DIR), which `trackio show` shows."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ppo.tracking.board import SAMPLE_COLUMNS, About, Bins, as_table


class Trackio:
    """One run. Its name is what it is found by, so it ends with an id."""

    def __init__(self, about: About) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._trackio = trackio
        self.run_id = about.run_id or f"{about.experiment}-{uuid.uuid4().hex[:6]}"
        self._run = trackio.init(
            project=about.project,
            name=self.run_id,
            config={key: str(value) for key, value in about.config.items()},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars."""
        self._run.log(dict(values), step=step)

    def samples(self, step: int, split: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table."""
        table = self._trackio.Table(columns=[*SAMPLE_COLUMNS], data=as_table(rows))
        self._run.log({f"samples/{split}": table}, step=step)

    def histogram(self, step: int, name: str, bins: Bins) -> None:
        """A histogram with our bins."""
        histogram = self._trackio.Histogram(np_histogram=(bins.counts, bins.edges))
        self._run.log({f"distribution/{name}": histogram}, step=step)

    def close(self, *, failed: bool) -> None:
        """Write what is left."""
        self._run.finish()
