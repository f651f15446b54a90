"""Log-probs, entropy and exact KL of given labels: one autograd function over the walks."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ppo.logprobs.blocks import (
    CPU_BLOCK_ELEMENTS,
    DEVICE_BLOCK_ELEMENTS,
    LogitTransform,
    Options,
    Reference,
    row_slices,
)
from ppo.logprobs.passes import Rows, Statistics, head_gradients, row_statistics


class LabelLogprobs(NamedTuple):
    """What a causal LM's scoring forward returns, one entry per scored token."""

    logprobs: Tensor
    """[K] float32: log softmax(z / T) at the label."""
    entropy: Tensor | None
    """[K] float32: entropy of softmax(z / T) in nats, or None when not asked for."""
    kl: Tensor | None = None
    """[K] float32: exact KL with another model's distribution, where there is one."""
    hidden: Tensor | None = None
    """[K, H] hidden states that the head has seen, where they are asked for."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    transform: LogitTransform | None = None,
    num_ids: int | None = None,
    reference: Reference | None = None,
    block_elements: int | None = None,
) -> LabelLogprobs:
    """Log-probability of each label, and the exact entropy of each distribution.

    With z = transform(hidden @ weight.T) and u = z / temperature: logprob = u[label] - logsumexp(u)
    and entropy = logsumexp(u) - sum softmax(u) u; with a reference, whose v = z' / temperature, the
    KL over all ids (`ppo.kl.full_kl`). All have gradients to `hidden` and `weight`.

    hidden: [K, H], K may be 0; weight: [V, H]; labels: [K] int64 in [0, V). The product runs in the
    dtype of `weight`, statistics in float32 (float64 for float64 weights).
    num_ids: only so many rows of the head, from 0 on, have a probability; None = all, V.
    block_elements bounds rows x columns of the block of logits that exists at a time; None picks it
    for the device.
    Raises ValueError on shapes that do not fit and on a temperature that is not positive.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden [K, H] and weight [V, H] do not fit: {[*hidden.shape]}, {[*weight.shape]}"
        )
    if labels.shape != hidden.shape[:1]:
        raise ValueError(f"labels {[*labels.shape]} do not fit hidden {[*hidden.shape]}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if block_elements is None:
        block_elements = (
            CPU_BLOCK_ELEMENTS if hidden.device.type == "cpu" else DEVICE_BLOCK_ELEMENTS
        )
    num_ids = len(weight) if num_ids is None else min(num_ids, len(weight))
    if reference is not None:
        if len(reference.hidden) != len(hidden) or len(reference.weight) < num_ids:
            raise ValueError(
                f"the reference has {len(reference.hidden)} tokens and {len(reference.weight)} "
                f"ids: {len(hidden)} tokens and at least {num_ids} ids are compared"
            )
        block_elements //= 2  # there are two blocks at a time
    options = Options(
        transform or LogitTransform(), temperature, with_entropy, block_elements, num_ids, reference
    )
    logprobs, entropy, kl = _TokenLogprobs.apply(hidden.to(weight.dtype), weight, labels, options)
    return LabelLogprobs(
        logprobs, entropy if with_entropy else None, None if reference is None else kl
    )


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, options: Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = [
            row_statistics(hidden[r], weight, labels[r], options, r)
            for r in row_slices(hidden.shape[0])
        ]
        statistics = Statistics(*(torch.cat(parts) for parts in zip(*rows, strict=True)))  # [K]
        ctx.save_for_backward(hidden, weight, labels, *statistics)
        ctx.options = options
        if not options.with_entropy:
            ctx.mark_non_differentiable(statistics.entropy)
        if options.reference is None:
            ctx.mark_non_differentiable(statistics.kl)
        return statistics.chosen - statistics.logsumexp, statistics.entropy, statistics.kl

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, grad_kl: Tensor
    ) -> tuple[Any, ...]:
        hidden, weight, labels, *statistics = ctx.saved_tensors
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        grad_weight = torch.empty_like(weight) if want_weight else None
        if grad_weight is not None:
            grad_weight[ctx.options.num_ids :].zero_()
        rows = [
            Rows(
                hidden[r],
                labels[r],
                grad_logprobs[r],
                grad_entropy[r],
                grad_kl[r],
                Statistics(*(each[r] for each in statistics)),
                r,
            )
            for r in row_slices(hidden.shape[0])
        ]
        grads = head_gradients(rows, weight, ctx.options, grad_weight)
        return torch.cat(grads) if want_hidden else None, grad_weight, None, None
