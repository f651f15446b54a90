"""Figures that models are compared by: mean@n, pass@k, maj@n of each data source.

Owns their definitions, names and table, for validation in training and for rollout.py alike. Must
not know how samples came about: it reads rows as `sample_rows` makes them.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import comb
from typing import Any, NamedTuple

PASS_SCORE = 1.0
"""a response passes with this score or more"""


def metric_head(name: str, source: str) -> str:
    """What follows val-core/ in metrics of a data source of a validation set; "" = without name."""
    return f"{name}/{source}" if name else source


class Summary(NamedTuple):
    """Figures of one data source; samples whose reward failed are left out of the scores."""

    num_prompts: int
    num_samples: int
    num_failed: int
    mean_score: float
    pass_at: dict[int, float]
    """by k"""
    maj: float | None
    """score of the answer that most responses to a prompt give; None where nobody takes answers"""
    mean_length: float
    max_length: int
    clip_ratio: float
    """share of responses that were cut by length"""
    extra: dict[str, float]
    """means of what rewards and episodes say besides the score, by name"""

    def __str__(self) -> str:
        passes = " ".join(f"pass@{k} {share:.3f}" for k, share in self.pass_at.items())
        votes = "" if self.maj is None else f"maj {self.maj:.3f} | "
        return (
            f"{self.num_prompts} prompts, {self.num_samples} samples ({self.num_failed} failed) | "
            f"score {self.mean_score:.3f} | {passes} | {votes}length {self.mean_length:.1f} "
            f"max {self.max_length} clipped {self.clip_ratio:.3f}"
        )

    def metrics(self, head: str, n: int) -> dict[str, float]:
        """As they are logged, for n samples a prompt; where every reward has failed, lengths."""
        found = {
            **{f"val-aux/{head}/{name}/mean": mean for name, mean in self.extra.items()},
            f"val-aux/{head}/response_length/mean": self.mean_length,
            f"val-aux/{head}/response_length/clip_ratio": self.clip_ratio,
        }
        if self.num_failed == self.num_samples:
            return found
        found[f"val-core/{head}/reward/mean@{n}"] = self.mean_score
        if n > 1:
            found |= {f"val-core/{head}/pass@{k}": share for k, share in self.pass_at.items()}
            if self.maj is not None:
                found[f"val-core/{head}/reward/maj@{n}"] = self.maj
        return found


def summarise(
    rows: Sequence[Mapping[str, Any]], *, pass_score: float = PASS_SCORE
) -> dict[str, Summary]:
    """Summaries by data source, in alphabetical order."""
    sources: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        sources[row["data_source"]].append(row)
    return {source: _summarise(sources[source], pass_score) for source in sorted(sources)}


def metrics_of(summaries: Mapping[str, Summary], n: int, name: str = "") -> dict[str, float]:
    """What is logged of n samples a prompt of a validation set, by data source."""
    return {
        metric: value
        for source, summary in summaries.items()
        for metric, value in summary.metrics(metric_head(name, source), n).items()
    }


def _summarise(rows: Sequence[Mapping[str, Any]], pass_score: float) -> Summary:
    groups: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["prompt_index"]] += [] if row["score"] is None else [row]
    scores = [row["score"] for group in groups.values() for row in group]
    lengths = [row["response_length"] for row in rows]
    most = max(len(group) for group in groups.values())
    votes = [majority_score(group) for group in groups.values() if group]
    return Summary(
        num_prompts=len(groups),
        num_samples=len(rows),
        num_failed=len(rows) - len(scores),
        mean_score=_mean(scores),
        pass_at={
            k: _mean(
                [
                    pass_at_k(len(group), sum(row["score"] >= pass_score for row in group), k)
                    for group in groups.values()
                    if len(group) >= k
                ]
            )
            for k in [2**i for i in range(most.bit_length())]
        },
        maj=_mean(votes) if any(row.get("answer") is not None for row in rows) else None,
        mean_length=_mean(lengths),
        max_length=max(lengths),
        clip_ratio=_mean([row["finish_reason"] == "length" for row in rows]),
        extra=_extra([row.get("components", {}) for row in rows]),
    )


def _extra(components: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the samples that have a number of that name."""
    names = sorted({name for each in components for name in each if name.startswith("extra/")})
    return {
        name.removeprefix("extra/"): _mean([each[name] for each in components if name in each])
        for name in names
    }


def table(rows: Sequence[tuple[str, Mapping[str, Summary]]]) -> str:
    """Summaries of several models, one line for each data source of each, in columns."""
    lines = [["", "data source", "prompts", "failed", "score"]]
    found = [(label, source, s) for label, sources in rows for source, s in sources.items()]
    passes = sorted({k for _, _, summary in found for k in summary.pass_at})
    votes = any(summary.maj is not None for _, _, summary in found)
    lines[0] += [f"pass@{k}" for k in passes] + ["maj"] * votes + ["length", "clipped"]
    for label, source, s in found:
        cells = [label, source, str(s.num_prompts), str(s.num_failed), f"{s.mean_score:.3f}"]
        cells += [f"{s.pass_at[k]:.3f}" if k in s.pass_at else "" for k in passes]
        cells += ["" if s.maj is None else f"{s.maj:.3f}"] * votes
        lines.append([*cells, f"{s.mean_length:.1f}", f"{s.clip_ratio:.3f}"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = (
        [cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(row)]
        for row in (list(zip(line, widths, strict=True)) for line in lines)
    )
    return "\n".join("  ".join(row).rstrip() for row in texts)


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Probability that one of k samples, drawn without replacement, passes.

    1 - C(n - c, k) / C(n, k), which is unbiased (Chen et al., arXiv 2107.03374, eq. 1).
    """
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def majority_score(group: Sequence[Mapping[str, Any]]) -> float:
    """Score of the answer that most of the responses to a prompt give (arXiv 2203.11171).

    Of answers that are given equally often it is the mean, what a lot among them gives on average.
    A response without an answer has no vote; where none has one, it is the mean of all scores.
    """
    scores: dict[str | None, list[float]] = defaultdict(list)
    for row in group:
        scores[row.get("answer")].append(row["score"])
    votes = Counter({text: len(found) for text, found in scores.items() if text is not None})
    if not votes:
        return _mean([row["score"] for row in group])
    most = max(votes.values())
    return _mean([_mean(scores[text]) for text, number in votes.items() if number == most])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
