"""SwanLab. SWANLAB_MODE=offline or local, SWANLAB_API_KEY and the like are read by its package."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ppo.tracking.board import SAMPLE_COLUMNS, About, Bins, as_text


class Swanlab:
    """One run, which a resume goes on with."""

    def __init__(self, about: About) -> None:
        import swanlab  # pyright: ignore[reportMissingImports]

        self._swanlab = swanlab
        self.run_id = about.run_id or uuid.uuid4().hex[:21]
        self._run = swanlab.init(
            project=about.project,
            name=about.experiment,
            id=self.run_id,
            resume="allow",
            log_dir=str(about.folder / "swanlab"),
            config=dict(about.config),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars."""
        self._run.log(dict(values), step=step)

    def samples(self, step: int, split: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Text, one a sample."""
        texts = [
            self._swanlab.Text(
                "\n\n".join(f"{name}: {as_text(row, name)}" for name in SAMPLE_COLUMNS)
            )
            for row in rows
        ]
        self._run.log({f"samples/{split}": texts}, step=step)

    def histogram(self, step: int, name: str, bins: Bins) -> None:
        """SwanLab has none."""

    def close(self, *, failed: bool) -> None:
        """Send what is left."""
        self._run.finish(state="crashed" if failed else "success")
