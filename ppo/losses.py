"""Losses per token, and how they become one number: pure tensor maths.

Owns the formulas of policy and value loss. Must not know configurations, models or ranks. Letters:
B sequences, T response tokens. Every aggregation is linear in the loss, with weights that follow
from the mask alone; `token_weights` gives them, so that a slice of a batch (a micro-batch, a
packed row, a rank's part) can be summed with the weights of the whole.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ppo.advantages import at_least_float32

AggregationMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]


class PolicyLoss(NamedTuple):
    """Per-token results of `policy_loss`, in the shape of its inputs."""

    loss: Tensor
    ratio: Tensor  # detached
    clipped: Tensor  # bool: the clip of the ratio decided the loss
    clipped_low: Tensor  # bool: the dual clip decided the loss


class ValueLoss(NamedTuple):
    """Per-token results of `value_loss`, in the shape of its inputs."""

    loss: Tensor
    clipped: Tensor  # bool: the clip of the value decided the loss


class ProbsDiff(NamedTuple):
    """Difference between the probabilities of trainer and engine over the counted tokens."""

    mean: Tensor
    max: Tensor


def token_weights(
    mask: Tensor,
    *,
    mode: AggregationMode,
    num_tokens: int | Tensor,
    num_seqs: int | Tensor,
    dp_size: int = 1,
    scale: float | None = None,
) -> Tensor:
    """What each token's loss is multiplied with before everything is summed.

    token-mean: D / num_tokens. token-sum: D. seq-mean-token-sum: D / num_seqs.
    seq-mean-token-mean: D / (num_seqs x counted tokens of the sequence). seq-mean-token-sum-norm
    (Dr. GRPO, arXiv 2503.20783): D / (num_seqs x scale).

    Args:
        mask: bool [B, T].
        mode: one of the names above.
        num_tokens: counted tokens of the mini-batch over all ranks.
        num_seqs: sequences with counted tokens of the mini-batch over all ranks. 0 counts as 1.
        dp_size: D, the ranks that FSDP averages gradients over.
        scale: for seq-mean-token-sum-norm, a constant length; None = T.

    Returns:
        float32 [B, T], 0 where `mask` is False.

    Raises:
        ValueError: unknown mode.
    """
    weights = mask.float() * dp_size
    num_tokens, num_seqs = (torch.as_tensor(n).clamp(min=1) for n in (num_tokens, num_seqs))
    match mode:
        case "token-mean":
            return weights / num_tokens
        case "token-sum":
            return weights
        case "seq-mean-token-sum":
            return weights / num_seqs
        case "seq-mean-token-mean":
            return weights / (num_seqs * mask.sum(-1, keepdim=True).clamp(min=1))
        case "seq-mean-token-sum-norm":
            return weights / (num_seqs * (mask.shape[-1] if scale is None else scale))
    raise ValueError(f"loss_agg_mode {mode!r}: must be one of {AggregationMode.__args__}")


def aggregate(
    loss: Tensor,
    mask: Tensor,
    *,
    mode: AggregationMode,
    num_tokens: int | Tensor,
    num_seqs: int | Tensor,
    dp_size: int = 1,
    scale: float | None = None,
) -> Tensor:
    """Sum of the counted token losses times their `token_weights`, a scalar.

    Args:
        loss: [B, T]; anything where `mask` is False.
        mask, mode, num_tokens, num_seqs, dp_size, scale: see `token_weights`.
    """
    weights = token_weights(
        mask, mode=mode, num_tokens=num_tokens, num_seqs=num_seqs, dp_size=dp_size, scale=scale
    )
    return (torch.where(mask, at_least_float32(loss), 0.0) * weights).sum()


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> PolicyLoss:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with dual clip (arXiv 1912.09729, eq. 5).

    r = e^d, d = logprobs - old_logprobs clamped to +-20; L = max(-A r, -A clip(r, 1 - clip_low,
    1 + clip_high)), and where A < 0 at most -A clip_c. Where an input is NaN, so is the loss, and
    the gradient is 0: a masked-out token cannot reach the gradient.

    Args:
        logprobs, old_logprobs, advantages: any one shape.
        clip_low, clip_high: epsilons below and above 1.
        clip_c: bound of the ratio for negative advantages, above 1; infinity turns it off.
    """
    advantages = at_least_float32(advantages).detach()
    difference = at_least_float32(logprobs) - at_least_float32(old_logprobs).detach()
    # 0 x NaN is NaN: the weight 0 of a masked token must not meet a NaN factor in the backward.
    difference = torch.where(advantages.isfinite(), difference, difference.detach())
    ratio = difference.clamp(-20.0, 20.0).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    negative = advantages < 0
    bound = torch.where(negative, -advantages, 0.0) * clip_c
    clipped_low = negative & (loss > bound)
    loss = torch.where(clipped_low, bound, loss)
    return PolicyLoss(loss, ratio.detach(), clipped > unclipped, clipped_low)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> ValueLoss:
    """Clipped value regression, 0.5 max((V - R)^2, (clip(V, V_old +- clip) - R)^2).

    As in OpenAI baselines' PPO2 (arXiv 1707.06347, eq. 9 gives the unclipped term). Where an input
    is not finite, the gradient is 0.

    Args:
        values, old_values, returns: any one shape.
        clip: how far a value may move from the old one, above 0.
    """
    old_values, returns = at_least_float32(old_values), at_least_float32(returns)
    values = at_least_float32(values)
    finite = values.isfinite() & old_values.isfinite() & returns.isfinite()
    values = torch.where(finite, values, values.detach())
    unclipped = (values - returns).square()
    limited = values.clamp(old_values - clip, old_values + clip)
    clipped = (limited - returns).square()
    return ValueLoss(0.5 * torch.maximum(unclipped, clipped), clipped > unclipped)


def rollout_probs_diff(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> ProbsDiff:
    """Absolute difference of probabilities between trainer and engine, mean and largest.

    Args:
        old_logprobs, rollout_logprobs: [B, T].
        mask: bool [B, T]; no counted token gives 0.
    """
    difference = (
        at_least_float32(old_logprobs).exp() - at_least_float32(rollout_logprobs).exp()
    ).abs()
    difference = torch.where(mask, difference, 0.0)
    mean = difference.sum() / mask.sum().clamp(min=1)
    return ProbsDiff(mean, difference.max() if difference.numel() else mean)
