"""Held-out prompts: generated from, scored, one row per sample.

Owns what validation in training and rollout.py have in common. Must not know where rows go.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from ppo.batch.samples import Samples
from ppo.config import ValSetConfig
from ppo.data.dataset import Prompts
from ppo.metrics import Metrics
from ppo.rollout.collector import Collector
from ppo.rollout.figures import metrics_of, summarise
from ppo.rollout.samples import sample_rows
from ppo.rollout.scoring import RewardsFailed, Scorer
from ppo.tracking.tracker import Tracker

Rows = list[dict[str, Any]]


class Job(NamedTuple):
    """Prompts of a validation set, and how they are sampled."""

    prompts: Prompts
    sampling: ValSetConfig
    """with nothing null"""


def validate(
    collector: Collector,
    scorer: Scorer,
    prompts: Mapping[str, Prompts],
    tracker: Tracker,
    metrics: Metrics,
    *,
    step: int,
) -> None:
    """Generate from each validation set, score, and set the metrics val-core/...; collective."""
    config = collector.config
    num_text, sets = config.trainer.log_val_generations, config.val_sets

    def keep(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        split = f"val-{name}" if name else "val"
        tracker.samples(step, rows, split=split, num_text=num_text)

    jobs = {name: Job(prompts[name], sets[name]) for name in prompts}
    found = sample_and_score(collector, scorer, jobs, step=step, keep=keep)
    for name, rows in (found or {}).items():  # on rank 0, which alone has them
        n = sets[name].n
        assert n is not None
        for metric, value in metrics_of(summarise(rows), n, name).items():
            metrics.add(metric, value, 1)


def sample_and_score(
    collector: Collector,
    scorer: Scorer,
    jobs: Mapping[str, Job],
    *,
    step: int,
    keep: Callable[[str, Sequence[Mapping[str, Any]]], None],
) -> dict[str, Rows] | None:
    """One row per sample, prompt-major, of each set by its name; on rank 0 alone. Collective.

    Args:
        keep: given the rows of each set on rank 0, also when the rewards of too many have failed,
            which raises RewardsFailed afterwards.
    """
    ignored = Metrics()  # its times and rewards are not the step's
    with collector.awake(ignored):
        batches = {
            name: _sampled(collector, scorer, job, step, ignored) for name, job in jobs.items()
        }
    failure = None
    for samples in (samples for parts in batches.values() for samples in parts):
        if failure is not None:
            scorer.leave_unscored(samples)
            continue
        try:
            scorer.score(samples, ignored)
        except RewardsFailed as error:
            failure = error
    mesh = scorer.run.mesh
    gathered = {name: [sample_rows(s, mesh) for s in parts] for name, parts in batches.items()}
    found = None
    try:
        if mesh.rank == 0:
            found = {name: _numbered(parts, jobs[name]) for name, parts in gathered.items()}
            for name, rows in found.items():
                keep(name, rows)
    finally:
        dist.barrier(group=mesh.host_group)  # see kept_on_failure
    if failure is not None:
        raise failure
    return found


def _sampled(
    collector: Collector, scorer: Scorer, job: Job, step: int, metrics: Metrics
) -> list[Samples]:
    """Samples of a set, data.val_batch_size prompts at once. Collective."""
    prompts, n = job.prompts, job.sampling.n
    assert n is not None
    params, numbers = collector.validation_params(step, job.sampling), range(len(prompts))
    size = collector.config.data.val_batch_size or len(prompts)
    return [
        collector.sample(
            [prompts[number] for number in numbers[start : start + size]],
            params,
            n,
            metrics,
            scorer.begin,
        )
        for start in numbers[::size]
    ]


def _numbered(parts: Sequence[Rows | None], job: Job) -> Rows:
    n = job.sampling.n
    assert n is not None
    flat = [row for part in parts for row in part or []]
    return [{"prompt_index": i // n, "sample": i % n} | row for i, row in enumerate(flat)]
