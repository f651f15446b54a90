"""Samples as people and files see them: rows, pass@k, parquet."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import comb
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed as dist

from ppo.batch import RolloutBatch
from ppo.files import new_file
from ppo.rollout.scoring import Scorer
from ppo.tracking.tracker import Tracker

TRAIN_SAMPLES = 4
"""training samples of each step that are kept as text"""


def sample_rows(batch: RolloutBatch, scorer: Scorer) -> list[dict[str, Any]]:
    """One JSON-able row per sample."""
    return [
        {
            "prompt": prompt.messages,
            "response": text,
            "score": None if failed else score,
            "data_source": prompt.data_source,
            "ground_truth": prompt.ground_truth,
            "finish_reason": reason,
            "response_length": len(ids),
            "uid": prompt.uid,
        }
        for prompt, text, score, failed, reason, ids in zip(
            batch.prompts,
            scorer.texts(batch),
            batch.scores.tolist(),
            batch.failed.tolist(),
            batch.finish_reasons,
            batch.response_ids,
            strict=True,
        )
    ]


def log_samples(tracker: Tracker, scorer: Scorer, batch: RolloutBatch, step: int) -> None:
    """A few training samples as text; lengths and scores as histograms."""
    if dist.get_rank() == 0:
        rows = sample_rows(batch, scorer)
        tracker.samples(step, rows[:TRAIN_SAMPLES], split="train", num_text=TRAIN_SAMPLES)
        tracker.histogram(step, "response_length", [float(len(r)) for r in batch.response_ids])
        tracker.histogram(step, "score", batch.scores[~batch.failed].tolist())


def mean_scores(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean score by data source, alphabetical; one whose rewards all failed has none."""
    scores: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["score"] is not None:
            scores[row["data_source"]].append(row["score"])
    return {source: _mean(scores[source]) for source in sorted(scores)}


class Summary(NamedTuple):
    """Figures of one data source; samples whose reward failed are left out of the scores."""

    num_prompts: int
    num_samples: int
    num_failed: int
    mean_score: float
    pass_at: dict[int, float]
    """by k"""
    mean_length: float
    max_length: int
    clip_ratio: float
    """share of responses that were cut by length"""

    def __str__(self) -> str:
        passes = " ".join(f"pass@{k} {share:.3f}" for k, share in self.pass_at.items())
        return (
            f"{self.num_prompts} prompts, {self.num_samples} samples ({self.num_failed} failed) | "
            f"score {self.mean_score:.3f} | {passes} | length {self.mean_length:.1f} "
            f"max {self.max_length} clipped {self.clip_ratio:.3f}"
        )


def summarise(rows: Sequence[Mapping[str, Any]], *, pass_score: float = 1.0) -> dict[str, Summary]:
    """Summaries by data source, in alphabetical order."""
    sources: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        sources[row["data_source"]].append(row)
    return {source: _summarise(sources[source], pass_score) for source in sorted(sources)}


def _summarise(rows: Sequence[Mapping[str, Any]], pass_score: float) -> Summary:
    groups: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        groups[row["prompt_index"]] += [] if row["score"] is None else [row["score"]]
    scores = [score for group in groups.values() for score in group]
    lengths = [row["response_length"] for row in rows]
    most = max(len(group) for group in groups.values())
    return Summary(
        num_prompts=len(groups),
        num_samples=len(rows),
        num_failed=len(rows) - len(scores),
        mean_score=_mean(scores),
        pass_at={
            k: _mean(
                [
                    pass_at_k(len(group), sum(score >= pass_score for score in group), k)
                    for group in groups.values()
                    if len(group) >= k
                ]
            )
            for k in [2**i for i in range(most.bit_length())]
        },
        mean_length=_mean(lengths),
        max_length=max(lengths),
        clip_ratio=_mean([row["finish_reason"] == "length" for row in rows]),
    )


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Probability that one of k samples, drawn without replacement, passes (Chen et al. 2021)."""
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def write_samples(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as JSONL or parquet, as the name says, beside and renamed.

    In parquet, what is neither a number nor text becomes JSON.
    """
    if path.suffix == ".jsonl":
        with new_file(path) as beside, beside.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        return
    plain = [
        {
            key: value
            if value is None or isinstance(value, (str, int, float))
            else json.dumps(value, ensure_ascii=False, default=str)
            for key, value in row.items()
        }
        for row in rows
    ]
    with new_file(path) as beside:
        pq.write_table(pa.Table.from_pylist(plain), beside)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
