"""MLflow: MLFLOW_TRACKING_URI says where, else a data base in the working folder."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ppo.tracking.board import About, Bins

FORBIDDEN = re.compile(r"[^\w\-. :/]")
"""in a name of MLflow; mean@1 becomes mean_1"""
BATCH = 90
"""parameters, or metrics, of one call"""
LONGEST_VALUE = 500
"""letters of a parameter"""


class Mlflow:
    """One run of an experiment that has the project's name."""

    def __init__(self, about: About) -> None:
        from mlflow import MlflowClient, entities  # pyright: ignore[reportMissingImports]

        self._client, self._entities = MlflowClient(), entities
        if about.run_id is not None:
            self.run_id = about.run_id
            self._client.update_run(self.run_id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(about.project)
        experiment = found.experiment_id if found else self._client.create_experiment(about.project)
        run = self._client.create_run(experiment, run_name=about.experiment)
        self.run_id = run.info.run_id
        params = [
            entities.Param(FORBIDDEN.sub("_", key), str(value)[:LONGEST_VALUE])
            for key, value in about.config.items()
        ]
        for start in range(0, len(params), BATCH):
            self._client.log_batch(self.run_id, params=params[start : start + BATCH])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics; a step that comes again has two values."""
        now, Metric = int(1000 * time.time()), self._entities.Metric
        metrics = [
            Metric(FORBIDDEN.sub("_", name), value, now, step) for name, value in values.items()
        ]
        for start in range(0, len(metrics), BATCH):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + BATCH])

    def samples(self, step: int, split: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """An artifact, as the run's own file of samples."""
        lines = (json.dumps(dict(row), default=str) for row in rows)
        self._client.log_text(self.run_id, "\n".join(lines), f"samples/{split}_{step:08d}.jsonl")

    def histogram(self, step: int, name: str, bins: Bins) -> None:
        """MLflow has none."""

    def close(self, *, failed: bool) -> None:
        """Say how it ended."""
        self._client.set_terminated(self.run_id, status="FAILED" if failed else "FINISHED")
