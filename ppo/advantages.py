"""Advantages: from rewards and values to what the policy loss multiplies, pure tensor maths.

Owns the estimators and the masked statistics that they need. Must not know configurations, models
or ranks, except through a `group` argument. Letters: B sequences, T response tokens. Index t of
rewards, values and mask speaks of response token t. Masked positions may hold anything, NaN and
infinity included: they change no result and are 0 in every result.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Advantages(NamedTuple):
    """What an estimator with a value function gives."""

    advantages: Tensor  # [B, T]
    returns: Tensor  # [B, T] targets of the value function


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or in float64 where it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of `x` over the positions where `mask` is True; 0 where there are none.

    Args:
        x: any shape.
        mask: bool, same shape.
    """
    return _zero_outside(x, mask).sum() / mask.sum().clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Shift and scale the counted positions to mean 0 and unbiased variance 1.

    The variance is taken around the mean in a second pass, and 1e-8 is added to it inside the root.

    Args:
        x: any shape.
        mask: bool, same shape.
        group: all-reduce the statistics over these ranks, each holding its part of the batch;
            every rank must call. None: `x` is the whole batch.
    """
    x = _zero_outside(x, mask)
    count, total = _all_reduced(torch.stack([mask.sum().double(), x.double().sum()]), group)
    mean = total / count.clamp(min=1)
    centred = _zero_outside(x - mean.to(x.dtype), mask)
    (square_sum,) = _all_reduced(centred.double().square().sum().reshape(1), group)
    variance = square_sum / (count - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + 1e-8).to(x.dtype)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> Advantages:
    """Generalised advantage estimation, not whitened (arXiv 1506.02438, eq. 16).

    delta_t = r_t + gamma V_(t+1) - V_t and A_t = delta_t + gamma lam A_(t+1), where t + 1 is the
    next counted position: a masked one passes value and advantage on unchanged. The last counted
    token of a sequence bootstraps with 0. Returns are A + V.

    Args:
        rewards, values: [B, T].
        mask: bool [B, T].
        gamma: discount per token.
        lam: weight between one-step (0) and Monte Carlo (1) advantages.
    """
    rewards, values = _zero_outside(rewards, mask), _zero_outside(values, mask)
    advantages = torch.zeros_like(values)
    next_value = values.new_zeros(values.shape[0])  # [B]
    running = values.new_zeros(values.shape[0])  # [B]
    for t in reversed(range(values.shape[1])):
        counted = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(counted, delta + gamma * lam * running, running)
        next_value = torch.where(counted, values[:, t], next_value)
        advantages[:, t] = running
    advantages = _zero_outside(advantages, mask)
    return Advantages(advantages, advantages + values)


def grpo(scores: Tensor, group_ids: Tensor, *, norm_by_std: bool) -> Tensor:
    """Score of a sequence relative to the sequences of the same prompt (arXiv 2402.03300, 4.1.2).

    (score - mean) / (std + 1e-6) with the unbiased std of the group, or score - mean (Dr. GRPO,
    arXiv 2503.20783). A group of one keeps mean 0 and std 1. A score that is not finite spoils
    its group: give a failed sample a group of its own.

    Args:
        scores: [B].
        group_ids: integers [B], equal for sequences of one prompt, in any order.
        norm_by_std: divide by the std.

    Returns:
        [B].
    """
    exact = scores.double()  # equal scores must give 0, not their rounding error over 1e-6
    _, group = group_ids.unique(return_inverse=True)  # [B]
    sizes = torch.bincount(group)  # [G]
    mean = exact.new_zeros(sizes.shape).index_add_(0, group, exact) / sizes
    mean = torch.where(sizes > 1, mean, 0.0)
    centred = exact - mean[group]
    if norm_by_std:
        square_sum = exact.new_zeros(sizes.shape).index_add_(0, group, centred.square())
        std = (square_sum / (sizes - 1).clamp(min=1)).sqrt()
        std = torch.where(sizes > 1, std, 1.0)
        centred = centred / (std[group] + 1e-6)
    return centred.to(at_least_float32(scores).dtype)


def _zero_outside(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, at_least_float32(x), 0.0)


def _all_reduced(sums: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(sums, group=group)
    return sums
