"""Samples as people and files see them: rows, parquet."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

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
        "score": samples.total_score(index) if has_score else None,
        "answer": samples.answers[index],
        "components": samples.components[index],
        "failure": samples.failures[index],
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "finish_reason": reason,
        "response_length": length,
        "uid": prompt.uid,
        "where": prompt.where,
    } | _of_episode(samples, index)


def _of_episode(samples: Samples, index: int) -> dict[str, Any]:
    """Of a sample that is an episode: what was said, and the tape that rollout.episode.replay
    reads."""
    if samples.conversations is None:
        return {}
    one = samples.conversations[index]
    return {
        "messages": one.messages,
        "episode": {"key": one.key, "counts": one.counts, "tape": one.tape},
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
