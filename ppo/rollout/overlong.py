"""DAPO's penalty for responses that come near the longest length (arXiv 2503.14476, eq. 13).

Owns the formula. Must not know who scores, or which groups are kept.
"""

import torch
from torch import Tensor

from ppo.batch.samples import Samples
from ppo.config import Config
from ppo.metrics import Metrics


def overlong_penalty(lengths: Tensor, *, longest: int, buffer: int, factor: float) -> Tensor:
    """min(-(length - (longest - buffer)) / buffer x factor, 0), float32, in the shape of lengths.

    Args:
        lengths: response tokens.
        longest: the most that a response may have.
        buffer: the last so many of them, over which the penalty grows.
        factor: what a response of the longest length costs.
    """
    exceeding = lengths.double() - (longest - buffer)
    return (-exceeding / buffer * factor).clamp(max=0.0).float()


def penalise_overlong(samples: Samples, config: Config, metrics: Metrics) -> None:
    """Add the penalty to the scores, as a component, and its mean and share to the metrics.

    Of an episode it is that of its longest segment.
    """
    buffer = config.reward.overlong_buffer
    if buffer.len is None:
        return
    penalty = overlong_penalty(
        torch.tensor([max(row.length for row in samples.rows(i)) for i in range(len(samples))]),
        longest=config.data.max_response_length,
        buffer=buffer.len,
        factor=buffer.penalty_factor,
    )
    samples.scores += penalty
    for components, value in zip(samples.components, penalty.tolist(), strict=True):
        components["overlong"] = value
    metrics.add("reward/overlong_penalty", penalty.sum().item(), len(samples))
    metrics.add("reward/overlong", int((penalty < 0).sum()), len(samples))
