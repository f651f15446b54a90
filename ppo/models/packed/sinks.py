"""Attention sinks (gpt-oss) from a flash kernel that knows none.

A sink is one more score of a head in the softmax, without a value. With L the logarithm of the sum
of exponentials of a query's scores, as flash kernels return it, the sink s takes the share
1 - sigmoid(L - s) from their output. The backward pass of flash attention (Dao et al. 2022, arXiv
2205.14135) makes the probabilities anew from L and needs the sum of each one times its gradient,
which is output x gradient of the output: given log(e^L + e^s) and the smaller output it computes
the gradients with the sink, and what is left over is the sink's. Must not know documents or models.

Layout: query [N, h, d], key and value [N, k, d], L [h, N] float32, sinks [h].
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class FlashKernel(NamedTuple):
    """Both passes of one attention, over the same documents."""

    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """query, key, value -> output [N, h, d], L"""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
    """gradient of the output, query, key, value, output, L -> their three gradients"""


def attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, kernel: FlashKernel
) -> Tensor:
    """Attention [N, h, d] in which each head has one more score, its sink. Differentiable."""
    output = _Attention.apply(query, key, value, sinks, kernel)
    assert isinstance(output, Tensor)
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, kernel: FlashKernel
    ) -> Tensor:
        output, logsumexp = kernel.forward(query, key, value)
        own = sinks.to(logsumexp.dtype)[:, None]  # [h, 1]
        share = torch.sigmoid(logsumexp - own)  # [h, N]
        output = (output * share.mT[..., None]).to(query.dtype)
        total = torch.logaddexp(logsumexp, own)
        ctx.save_for_backward(query, key, value, sinks, output, total)
        ctx.kernel = kernel
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, total = ctx.saved_tensors
        grads = ctx.kernel.backward(grad.contiguous(), query, key, value, output, total)
        mass = torch.exp(sinks.to(total.dtype)[:, None] - total)  # [h, N]: the sinks' probability
        summed = (grad.to(total.dtype) * output.to(total.dtype)).sum(-1)  # [N, h]
        of_sinks = -(mass * summed.mT).sum(1)
        return *grads, of_sinks.to(sinks.dtype), None
