"""Held-out prompts: generated from, scored, one row per sample.

Owns what validation in training and rollout.py have in common. Must not know where rows go.
"""

from collections.abc import Sequence
from typing import Any

from ppo.data.dataset import Prompt
from ppo.metrics import Metrics
from ppo.models.learner import Model
from ppo.rollout.collector import Collector
from ppo.rollout.samples import mean_scores, sample_rows
from ppo.rollout.scoring import Scorer
from ppo.tracking.tracker import Tracker


def validate(
    collector: Collector,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    actor: Model,
    tracker: Tracker,
    metrics: Metrics,
    *,
    step: int,
) -> None:
    """Generate from held-out prompts, score, and set val-core/SOURCE/reward/mean@N."""
    config = collector.config
    rows = sample_and_score(collector, scorer, prompts, actor, step=step)
    for source, score in mean_scores(rows).items():
        metrics.set(f"val-core/{source}/reward/mean@{config.rollout.val_kwargs.n}", score)
    tracker.samples(step, rows, split="val", num_text=config.trainer.log_val_generations)


def sample_and_score(
    collector: Collector, scorer: Scorer, prompts: Sequence[Prompt], actor: Model, *, step: int
) -> list[dict[str, Any]]:
    """One row per sample, prompt-major, sampled as rollout.val_kwargs says. Collective."""
    config, ignored = collector.config, Metrics()  # its times and rewards are not the step's
    n, size = config.rollout.val_kwargs.n, config.data.val_batch_size or len(prompts)
    params = collector.validation_params(step)
    with collector.awake(actor, ignored):
        batches = [
            collector.sample(prompts[start : start + size], params, n)
            for start in range(0, len(prompts), size)
        ]
    rows = []
    for batch in batches:
        scorer.score(batch, ignored)
        for row in sample_rows(batch, scorer):
            index = len(rows)
            rows.append({"prompt_index": index // n, "sample": index % n} | row)
    return rows
