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


def masked_mean(x: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Mean of `x` over the positions where `mask` is True; 0 where there are none.

    Args:
        x: any shape.
        mask: bool, same shape.
        group: of the parts of all these ranks, as for `masked_whiten`; the result is float64.
    """
    total, count = _zero_outside(x, mask), mask.sum()
    if group is None:
        return total.sum() / count.clamp(min=1)
    total, count = all_reduced(torch.stack([total.double().sum(), count.double()]), group)
    return total / count.clamp(min=1)


def masked_variance(x: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Unbiased variance of the counted positions, around the mean in a second pass, in float64.

    Args:
        x, mask, group: as for `masked_whiten`.
    """
    return _centred(x, mask, group)[1]


def masked_whiten(x: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Shift and scale the counted positions to mean 0 and unbiased variance 1.

    The variance is taken around the mean in a second pass, and 1e-8 is added to it inside the root.

    Args:
        x: any shape.
        mask: bool, same shape.
        group: all-reduce the statistics over these ranks, each holding its part of the batch;
            every rank must call. None: `x` is the whole batch.
    """
    centred, variance = _centred(x, mask, group)
    return centred * torch.rsqrt(variance + 1e-8).to(centred.dtype)


def _centred(x: Tensor, mask: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """`x` minus its mean, 0 where it does not count, and its variance, a float64 scalar."""
    x = _zero_outside(x, mask)
    count, total = all_reduced(torch.stack([mask.sum().double(), x.double().sum()]), group)
    mean = total / count.clamp(min=1)
    centred = _zero_outside(x - mean.to(x.dtype), mask)
    (square_sum,) = all_reduced(centred.double().square().sum().reshape(1), group)
    return centred, square_sum / (count - 1).clamp(min=1)


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
    deltas = _zero_outside(rewards + gamma * _next_counted(values, mask) - values, mask)
    advantages = _discounted(deltas, mask, gamma * lam)
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
    groups = _Groups(group_ids)
    exact = scores.double()  # equal scores must give 0, not their rounding error over 1e-6
    centred = exact - groups.mean(exact)
    if norm_by_std:
        square_sum = groups.sum(centred.square())
        std = (square_sum / (groups.sizes - 1).clamp(min=1)).sqrt()
        centred = centred / (torch.where(groups.sizes > 1, std, 1.0) + 1e-6)
    return centred.to(at_least_float32(scores).dtype)


def rloo(scores: Tensor, group_ids: Tensor) -> Tensor:
    """Score minus the mean of the other sequences of the prompt (RLOO, arXiv 2402.14740).

    Which is n / (n - 1) x (score - mean of all n). A group of one is left as it is.

    Args and result: [B] and integers [B], as for `grpo`; a score that is not finite spoils its
    group.
    """
    groups = _Groups(group_ids)
    exact, n = scores.double(), groups.sizes.double()
    scale = torch.where(n > 1, n / (n - 1).clamp(min=1), 1.0)
    return (scale * (exact - groups.mean(exact))).to(at_least_float32(scores).dtype)


def opd(old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """On-policy distillation: how much likelier the teacher finds each token, [B, T] -> [B, T].

    -(log pi_old - log pi_ref), the reverse KL's sample at each token as its reward, undiscounted
    and not summed over what follows (K. Lu, "On-Policy Distillation", Thinking Machines, 2025).

    Args:
        old_logprobs, ref_logprobs: [B, T], of policy and teacher.
        mask: bool [B, T].

    Returns:
        [B, T], 0 where `mask` is False.
    """
    difference = at_least_float32(ref_logprobs) - at_least_float32(old_logprobs)
    return torch.where(mask, difference, 0.0)


def opo(scores: Tensor, lengths: Tensor, group_ids: Tensor) -> Tensor:
    """Score minus the length-weighted mean of the prompt's sequences (OPO, arXiv 2505.23585).

    The baseline of least variance for token gradients that are alike. A group of one keeps
    baseline 0.

    Args:
        scores: [B].
        lengths: counted tokens of each response, [B].
        group_ids: integers [B], as for `grpo`.

    Returns:
        [B].
    """
    groups = _Groups(group_ids)
    exact, weights = scores.double(), lengths.double()
    baseline = groups.sum(weights * exact) / groups.sum(weights).clamp(min=1.0)
    baseline = torch.where(groups.sizes > 1, baseline, 0.0)
    return (exact - baseline).to(at_least_float32(scores).dtype)


def reinforce_plus_plus(
    rewards: Tensor, mask: Tensor, *, gamma: float, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Discounted rewards to go, whitened over the whole batch (REINFORCE++, arXiv 2501.03262).

    Args:
        rewards: [B, T], KL penalty included.
        mask: bool [B, T].
        gamma: discount per counted token.
        group: as for `masked_whiten`.

    Returns:
        [B, T].
    """
    return masked_whiten(rewards_to_go(rewards, mask, gamma=gamma), mask, group)


def reinforce_plus_plus_baseline(scores: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
    """Score minus the prompt's mean at every token, whitened over the batch (arXiv 2501.03262).

    A group of one keeps mean 0.

    Args:
        scores: [B].
        group_ids: integers [B], as for `grpo`.
        mask: bool [B, T].

    Returns:
        [B, T].
    """
    centred = grpo(scores, group_ids, norm_by_std=False)
    return masked_whiten(centred[:, None].expand(mask.shape), mask)


def remax(rewards: Tensor, greedy_scores: Tensor, mask: Tensor) -> Tensor:
    """Rewards to go minus the score of the greedy response (ReMax, arXiv 2310.10505, algorithm 1).

    Args:
        rewards: [B, T], KL penalty included.
        greedy_scores: of the greedy response to each sequence's prompt, [B].
        mask: bool [B, T].

    Returns:
        [B, T], 0 where `mask` is False.
    """
    to_go = rewards_to_go(rewards, mask, gamma=1.0)
    return _zero_outside(to_go - greedy_scores[:, None], mask)


def rewards_to_go(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """sum over counted u >= t of gamma^(u - t) r_u, where u - t counts counted tokens; [B, T]."""
    return _discounted(_zero_outside(rewards, mask), mask, gamma)


def _discounted(x: Tensor, mask: Tensor, discount: float) -> Tensor:
    """x_t + discount x the result at the next counted position; [B, T], x 0 outside the mask."""
    columns, factors = _by_time(x), _by_time(torch.full_like(x, discount).where(mask, 1.0))
    for t in reversed(range(len(columns) - 1)):
        columns[t] += factors[t].mul_(columns[t + 1])
    return _zero_outside(columns.t(), mask).contiguous()


def _next_counted(x: Tensor, mask: Tensor) -> Tensor:
    """At each position the value of the next counted one, 0 behind the last; [B, T]."""
    result, columns, counted = torch.zeros_like(x.t()), _by_time(x), _by_time(mask)
    for t in reversed(range(len(columns) - 1)):
        torch.where(counted[t + 1], columns[t + 1], result[t + 1], out=result[t])
    return result.t()


def _by_time(x: Tensor) -> Tensor:
    """A copy [T, B]: what a loop over time touches lies together."""
    return x.t().clone(memory_format=torch.contiguous_format)


class _Groups:
    """Sums over the sequences of a prompt, given back for each sequence."""

    def __init__(self, group_ids: Tensor) -> None:
        _, self._group, counts = group_ids.unique(return_inverse=True, return_counts=True)
        self.sizes = counts[self._group]  # [B]

    def sum(self, x: Tensor) -> Tensor:
        """[B] -> [B]."""
        totals = x.new_zeros(x.shape).index_add_(0, self._group, x)  # a group's at its number
        return totals[self._group]

    def mean(self, x: Tensor) -> Tensor:
        """[B] -> [B]; 0 in a group of one."""
        return torch.where(self.sizes > 1, self.sum(x) / self.sizes, 0.0)


def _zero_outside(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, at_least_float32(x), 0.0)


def all_reduced(sums: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`sums` added up over the ranks of the group, in place; None: there is one rank."""
    if group is not None:
        dist.all_reduce(sums, group=group)
    return sums
