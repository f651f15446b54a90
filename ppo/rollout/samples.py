"""Samples as people and files see them: rows, pass@k, parquet."""

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import comb
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed as dist

from ppo.batch.samples import Samples
from ppo.files import new_file
from ppo.rollout.scoring import RewardsFailed, Scorer
from ppo.tracking.tracker import Tracker
from sharding.agree import gather_to_first
from sharding.mesh import Mesh

NUMBERS = {
    "score": pa.float64(),
    **dict.fromkeys(("prompt_index", "sample", "response_length", "uid"), pa.int64()),
}
"""columns of a samples file that are no text"""


def sample_rows(
    samples: Samples, mesh: Mesh, *, only: Collection[int] | None = None
) -> list[dict[str, Any]] | None:
    """JSON-able rows of the samples of all ranks, in order, on rank 0; None elsewhere. Collective.

    only: numbers of those that are wanted; None = all.
    """
    completions = samples.completions
    found = [
        (
            number,
            _row(samples, index, completions.lengths[index], completions.finish_reasons[index]),
        )
        for index, number in enumerate(samples.numbers)
        if only is None or number in only
    ]
    parts = gather_to_first(found, mesh.host_group)
    if parts is None:
        return None
    return [row for _, row in sorted((pair for part in parts for pair in part), key=itemgetter(0))]


def _row(samples: Samples, index: int, length: int, reason: str) -> dict[str, Any]:
    prompt = samples.prompt(index)
    has_score = samples.are_scored and not samples.failed[index]
    return {
        "prompt": prompt.messages,
        "response": samples.texts[index],
        "score": samples.scores[index].item() if has_score else None,
        "components": samples.components[index],
        "failure": samples.failures[index],
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "finish_reason": reason,
        "response_length": length,
        "uid": prompt.uid,
        "where": prompt.where,
    }


@contextmanager
def kept_on_failure(
    tracker: Tracker, scorer: Scorer, samples: Samples, step: int
) -> Iterator[None]:
    """When too many rewards fail in the block, all samples of the step are kept: they show why.

    Collective then: ranks that ended earlier would have torchrun kill the one that writes.
    """
    try:
        yield
    except RewardsFailed:
        rows = sample_rows(samples, scorer.run.mesh)
        try:
            if rows is not None:
                tracker.samples(step, rows, split="train", num_text=0)
        finally:
            dist.barrier(group=scorer.run.mesh.host_group)
        raise


def validation_metrics(rows: Sequence[Mapping[str, Any]], n: int) -> dict[str, float]:
    """What is logged of n samples a prompt: mean@n and, with several, pass@k by data source.

    A source whose rewards all failed has none.
    """
    metrics = {}
    for source, summary in summarise(rows).items():
        if summary.num_failed < summary.num_samples:
            metrics[f"val-core/{source}/reward/mean@{n}"] = summary.mean_score
            passes = summary.pass_at if n > 1 else {}
            metrics |= {f"val-core/{source}/pass@{k}": share for k, share in passes.items()}
    return metrics


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

    In parquet, all but NUMBERS is text, and what is not text is written as JSON: ground truths may
    be of several types. Nothing that a row holds costs the file.
    """
    with new_file(path) as beside:
        if path.suffix == ".jsonl":
            with beside.open("w", encoding="utf-8") as file:
                for row in rows:
                    known = {name: _known_to_json(value) for name, value in row.items()}
                    file.write(_json(known) + "\n")
            return
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row.get(name) for row in rows] for name in names}
        table = {
            name: pa.array(values, NUMBERS[name])
            if name in NUMBERS
            else pa.array(map(_text, values), pa.string())
            for name, values in columns.items()
        }
        pq.write_table(pa.table(table), beside)


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return _valid(value) if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    """JSON of anything: what JSON does not know is text, half a surrogate pair is escaped."""
    return _valid(json.dumps(_known_to_json(value), ensure_ascii=False, default=str))


def _known_to_json(value: Any) -> Any:
    try:
        json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that are no text, circles
        try:
            return repr(value)
        except ValueError:  # whole numbers of thousands of digits
            return f"a {type(value).__name__}"
    return value


def _valid(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
