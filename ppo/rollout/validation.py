"""Held-out prompts: generated from, scored, one row per sample.

Owns what validation in training and rollout.py have in common. Must not know where rows go.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ppo.data.dataset import Prompts
from ppo.metrics import Metrics
from ppo.rollout.collector import Collector
from ppo.rollout.samples import sample_rows, validation_metrics
from ppo.rollout.scoring import RewardsFailed, Scorer
from ppo.tracking.tracker import Tracker


def validate(
    collector: Collector,
    scorer: Scorer,
    prompts: Prompts,
    tracker: Tracker,
    metrics: Metrics,
    *,
    step: int,
) -> None:
    """Generate from held-out prompts, score, and set the metrics val-core/SOURCE/..."""
    config = collector.config
    num_text = config.trainer.log_val_generations

    def keep(rows: Sequence[Mapping[str, Any]]) -> None:
        tracker.samples(step, rows, split="val", num_text=num_text)

    rows = sample_and_score(collector, scorer, prompts, step=step, keep=keep)
    for name, value in validation_metrics(rows or [], config.rollout.val_kwargs.n).items():
        metrics.add(name, value, 1)  # on rank 0, which alone has them


def sample_and_score(
    collector: Collector,
    scorer: Scorer,
    prompts: Prompts,
    *,
    step: int,
    keep: Callable[[Sequence[Mapping[str, Any]]], None],
) -> list[dict[str, Any]] | None:
    """One row per sample, prompt-major, sampled as rollout.val_kwargs says; on rank 0 alone.

    Collective.

    Args:
        keep: given all rows on rank 0, also when the rewards of too many have failed, which raises
            RewardsFailed afterwards.
    """
    config, ignored = collector.config, Metrics()  # its times and rewards are not the step's
    n, size = config.rollout.val_kwargs.n, config.data.val_batch_size or len(prompts)
    params, numbers = collector.validation_params(step), range(len(prompts))
    with collector.awake(ignored):
        batches = []
        for start in numbers[::size]:
            chunk = [prompts[number] for number in numbers[start : start + size]]
            batches.append(collector.sample(chunk, params, n, ignored, scorer.begin))
    failure = None
    for samples in batches:
        if failure is not None:
            scorer.leave_unscored(samples)
            continue
        try:
            scorer.score(samples, ignored)
        except RewardsFailed as error:
            failure = error
    mesh, rows = scorer.run.mesh, None
    parts = [sample_rows(samples, mesh) for samples in batches]
    try:
        if mesh.rank == 0:
            flat = [row for part in parts for row in part or []]
            rows = [{"prompt_index": i // n, "sample": i % n} | row for i, row in enumerate(flat)]
            keep(rows)
    finally:
        dist.barrier(group=mesh.host_group)  # see kept_on_failure
    if failure is not None:
        raise failure
    return rows
