"""Log-probabilities and entropy of given labels without the logits of a whole sequence.

Owns the product of hidden states and the output head and everything up to log softmax(z / T). The
head is walked in blocks of the vocabulary; the backward pass computes each block again, so that the
largest tensor beside the weight and its gradient is one block. Knows nothing of models,
configuration or process groups.

Letters: K scored tokens, H hidden, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Elements of one block of logits. On a CPU a block should stay in the last-level cache; on an
# accelerator it should be large enough to keep the matrix units busy (float32: 256 MiB).
CPU_BLOCK_ELEMENTS = 1 << 21
DEVICE_BLOCK_ELEMENTS = 1 << 26
# Rows are cut only beyond this, because every further cut reads the whole head again.
MAX_BLOCK_ROWS = 8192
MIN_BLOCK_COLUMNS = 128


class LabelLogprobs(NamedTuple):
    """What a causal LM's scoring forward returns, one entry per scored token."""

    logprobs: Tensor
    """[K] float32: log softmax(z / T) at the label."""
    entropy: Tensor | None
    """[K] float32: entropy of softmax(z / T) in nats, or None when not asked for."""


class LogitTransform(NamedTuple):
    """How a model's logits follow from hidden x head: z = softcap(scale * x)."""

    scale: float = 1.0
    softcap: float | None = None
    """c of z = c * tanh(x / c) (Gemma 2), or None."""

    def __call__(self, product: Tensor) -> Tensor:
        """Logits z for products x of hidden states and head, of any shape."""
        if self.softcap is None:
            return self.scale * product
        return self.softcap * torch.tanh(product * (self.scale / self.softcap))


class _Options(NamedTuple):
    transform: LogitTransform
    temperature: float
    with_entropy: bool
    block_elements: int
    num_ids: int
    """rows of the head that count, from 0 on"""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    transform: LogitTransform | None = None,
    num_ids: int | None = None,
    block_elements: int | None = None,
) -> LabelLogprobs:
    """Log-probability of each label, and the exact entropy of each distribution.

    With z = transform(hidden @ weight.T) and u = z / temperature: logprob = u[label] - logsumexp(u)
    and entropy = logsumexp(u) - sum softmax(u) u. Both have gradients to `hidden` and `weight`.

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
    options = _Options(
        transform or LogitTransform(), temperature, with_entropy, block_elements, num_ids
    )
    logprobs, entropy = _TokenLogprobs.apply(hidden.to(weight.dtype), weight, labels, options)
    return LabelLogprobs(logprobs, entropy if with_entropy else None)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor]:
        rows = [
            _row_statistics(hidden[r], weight, labels[r], options)
            for r in _row_slices(hidden.shape[0])
        ]
        chosen, logsumexp, entropy = (torch.cat(parts) for parts in zip(*rows, strict=True))  # [K]
        ctx.save_for_backward(hidden, weight, labels, logsumexp, entropy)
        ctx.options = options
        if not options.with_entropy:
            ctx.mark_non_differentiable(entropy)
        return chosen - logsumexp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Any, ...]:
        hidden, weight, labels, logsumexp, entropy = ctx.saved_tensors
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        grad_weight = torch.empty_like(weight) if want_weight else None
        if grad_weight is not None:
            grad_weight[ctx.options.num_ids :].zero_()
        rows = [
            _Rows(hidden[r], grad_logprobs[r], grad_entropy[r], logsumexp[r], entropy[r], labels[r])
            for r in _row_slices(hidden.shape[0])
        ]
        grads = _backward(rows, weight, ctx.options, grad_weight)
        return torch.cat(grads) if want_hidden else None, grad_weight, None, None


class _Rows(NamedTuple):
    """One slice of rows: hidden states [R, H], upstream gradients and saved statistics [R]."""

    hidden: Tensor
    grad_logprobs: Tensor
    grad_entropy: Tensor
    logsumexp: Tensor
    entropy: Tensor
    labels: Tensor


def _row_slices(num_rows: int) -> list[slice]:
    """Slices of at most MAX_BLOCK_ROWS rows; one empty slice when there are none."""
    starts = range(0, max(num_rows, 1), MAX_BLOCK_ROWS)
    return [slice(start, min(start + MAX_BLOCK_ROWS, num_rows)) for start in starts]


def _column_slices(num_rows: int, num_columns: int, block_elements: int) -> Iterator[slice]:
    width = max(block_elements // max(num_rows, 1), MIN_BLOCK_COLUMNS)
    for start in range(0, num_columns, width):
        yield slice(start, min(start + width, num_columns))


def _statistics_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the statistics dtype. CUDA's matrix units add up in float32 anyway: keep that."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).to(_statistics_dtype(a))


def _block_logits(hidden: Tensor, weight: Tensor, options: _Options) -> Tensor:
    """u = transform(hidden @ weight.T) / temperature, new, [R, C], statistics dtype."""
    u = _product(hidden, weight.t())
    scale, softcap = options.transform
    if softcap is not None:
        return u.mul_(scale / softcap).tanh_().mul_(softcap / options.temperature)
    return u if scale == options.temperature else u.mul_(scale / options.temperature)


def _label_columns(labels: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Column of each label in the block, clamped into it [R, 1], and whether it lies there [R]."""
    inside = (labels >= columns.start) & (labels < columns.stop)
    return (labels - columns.start).clamp(0, columns.stop - columns.start - 1)[:, None], inside


def _row_statistics(
    hidden: Tensor, weight: Tensor, labels: Tensor, options: _Options
) -> tuple[Tensor, Tensor, Tensor]:
    """(u at the label, logsumexp of u, entropy) of each row, in one pass over the vocabulary.

    The running maximum and sums are those of online softmax (Milakov & Gimelshein 2018).
    """
    dtype = _statistics_dtype(weight)
    maximum = hidden.new_full(labels.shape, -torch.inf, dtype=dtype)
    total, weighted, chosen = (torch.zeros_like(maximum) for _ in range(3))
    for columns in _column_slices(len(labels), options.num_ids, options.block_elements):
        u = _block_logits(hidden, weight[columns], options)  # [R, C]
        index, inside = _label_columns(labels, columns)
        chosen = torch.where(inside, u.gather(1, index).squeeze(1), chosen)
        new_maximum = torch.maximum(maximum, u.amax(1))
        rescale = torch.exp(maximum - new_maximum)
        maximum = new_maximum
        if options.with_entropy:
            exponentials = (u - maximum[:, None]).exp_()
            total = total * rescale + exponentials.sum(1)
            weighted = weighted * rescale + exponentials.mul_(u).sum(1)
        else:
            total = total * rescale + u.sub_(maximum[:, None]).exp_().sum(1)
    logsumexp = maximum + total.log()
    entropy = logsumexp - weighted / total if options.with_entropy else torch.zeros_like(logsumexp)
    return chosen, logsumexp, entropy


def _backward(
    rows: list[_Rows], weight: Tensor, options: _Options, grad_weight: Tensor | None
) -> list[Tensor]:
    """Gradients to the hidden states of each slice, each [R, H]; fills `grad_weight` [V, H].

    Slices of rows are the inner loop, so that a block of `grad_weight` is summed over all of them
    in the statistics dtype and rounded once.
    """
    dtype = _statistics_dtype(weight)
    grads = [torch.zeros_like(part.hidden, dtype=dtype) for part in rows]
    for columns in _column_slices(len(rows[0].labels), options.num_ids, options.block_elements):
        block, summed = weight[columns], None
        for part, grad_hidden in zip(rows, grads, strict=True):
            grad_block = _block_gradient(part, block, options, columns)  # [R, C]
            if weight.dtype == dtype:
                grad_hidden.addmm_(grad_block, block)
            else:
                grad_hidden.add_(_product(grad_block, block))
            if grad_weight is not None and len(rows) == 1:
                torch.mm(grad_block.t(), part.hidden, out=grad_weight[columns])
            elif grad_weight is not None:
                product = _product(grad_block.t(), part.hidden)  # [C, H]
                summed = product if summed is None else summed.add_(product)
        if grad_weight is not None and summed is not None:
            grad_weight[columns] = summed
    return [grad.to(weight.dtype) for grad in grads]


def _block_gradient(part: _Rows, weight: Tensor, options: _Options, columns: slice) -> Tensor:
    """Gradient to hidden @ weight.T of one block, [R, C] in the dtype of `weight`.

    With p = softmax(u): d logprob / du = onehot - p and d entropy / du = -p (u - logsumexp + H).
    """
    scale, softcap = options.transform
    grad_logprobs = part.grad_logprobs * (scale / options.temperature)
    index, inside = _label_columns(part.labels, columns)
    onehot = torch.where(inside, grad_logprobs, 0.0)[:, None]

    u = _block_logits(part.hidden, weight, options)
    slope = None
    if softcap is not None:  # d tanh
        slope = 1 - (u * (options.temperature / softcap)).square_()
    if options.with_entropy:
        grad_entropy = part.grad_entropy * (scale / options.temperature)
        constant = grad_entropy * (part.logsumexp - part.entropy) - grad_logprobs
        p = (u - part.logsumexp[:, None]).exp_()
        du = u.mul_(-grad_entropy[:, None]).add_(constant[:, None]).mul_(p)
    else:
        du = u.sub_(part.logsumexp[:, None]).exp_().mul_(-grad_logprobs[:, None])
    du.scatter_add_(1, index, onehot)
    if slope is not None:
        du.mul_(slope)
    return du.to(weight.dtype)
