"""The two walks over the head: what is found of each row, and the gradients, block by block.

The backward pass computes each block again. What a KL over the vocabulary needs of the other model
is computed in the same walks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ppo.logprobs.blocks import (
    Options,
    block_logits,
    column_slices,
    label_columns,
    product,
    reference_logits,
    statistics_dtype,
)


class Rows(NamedTuple):
    """One slice of rows: hidden states [R, H], labels, upstream gradients and statistics [R]."""

    hidden: Tensor
    labels: Tensor
    grad_logprobs: Tensor
    grad_entropy: Tensor
    grad_kl: Tensor
    statistics: "Statistics"
    place: slice
    """among all rows"""


class Statistics(NamedTuple):
    """What one pass over the vocabulary finds, [R] each; 0 where it is not asked for."""

    chosen: Tensor  # u at the label
    logsumexp: Tensor  # of u
    entropy: Tensor
    reference_logsumexp: Tensor  # of v
    kl: Tensor


class _OnlineSoftmax:
    """logsumexp of x, and the mean of something under softmax(x), block by block.

    The running maximum and sums are those of online softmax (Milakov & Gimelshein 2018).
    """

    def __init__(self, num_rows: int, num_means: int, like: Tensor) -> None:
        dtype = statistics_dtype(like)
        self._maximum = like.new_full((num_rows,), -torch.inf, dtype=dtype)
        self._total = torch.zeros_like(self._maximum)
        self._weighted = [torch.zeros_like(self._maximum) for _ in range(num_means)]

    def add(self, x: Tensor, *values: Tensor) -> None:
        """Take in a block [R, C], and what means are taken of; without those, x is used up."""
        maximum = torch.maximum(self._maximum, x.amax(1))
        rescale = torch.exp(self._maximum - maximum)
        self._maximum = maximum
        shifted = x - maximum[:, None] if values else x.sub_(maximum[:, None])
        exponentials = shifted.exp_()
        self._total = self._total * rescale + exponentials.sum(1)
        self._weighted = [
            old * rescale + (exponentials * value).sum(1)
            for old, value in zip(self._weighted, values, strict=True)
        ]

    @property
    def logsumexp(self) -> Tensor:
        return self._maximum + self._total.log()

    @property
    def means(self) -> list[Tensor]:
        return [weighted / self._total for weighted in self._weighted]


def row_statistics(
    hidden: Tensor, weight: Tensor, labels: Tensor, options: Options, rows: slice
) -> Statistics:
    """What one pass over the vocabulary finds of each row."""
    reference, with_entropy = options.reference, options.with_entropy
    of_reference = reference is not None and reference.is_forward  # the KL's mean is taken there
    of_policy = reference is not None and not reference.is_forward
    policy = _OnlineSoftmax(len(labels), with_entropy + of_policy, weight)
    other = _OnlineSoftmax(len(labels), int(of_reference), weight)
    chosen = torch.zeros_like(policy.logsumexp)
    for columns in column_slices(len(labels), options.num_ids, options.block_elements):
        u = block_logits(hidden, weight[columns], options.transform, options.temperature)  # [R, C]
        index, inside = label_columns(labels, columns)
        chosen = torch.where(inside, u.gather(1, index).squeeze(1), chosen)
        compared = []
        if reference is not None:
            v = reference_logits(options, rows, columns, u)
            if of_policy:
                compared.append(u - v)
            other.add(v, *([v - u] if of_reference else []))
            del v
        policy.add(u, *([u] if with_entropy else []), *compared)
        del u, compared  # before the next block is made
    logsumexp, means = policy.logsumexp, [*policy.means, *other.means]
    nothing = torch.zeros_like(logsumexp)
    entropy = logsumexp - means[0] if with_entropy else nothing
    if reference is None:
        return Statistics(chosen, logsumexp, entropy, nothing, torch.zeros_like(logsumexp))
    apart = logsumexp - other.logsumexp
    kl = means[-1] + apart if of_reference else means[-1] - apart
    return Statistics(chosen, logsumexp, entropy, other.logsumexp, kl)


def head_gradients(
    rows: list[Rows], weight: Tensor, options: Options, grad_weight: Tensor | None
) -> list[Tensor]:
    """Gradients to the hidden states of each slice, each [R, H]; fills `grad_weight` [V, H].

    Slices of rows are the inner loop, so that a block of `grad_weight` is summed over all of them
    in the statistics dtype and rounded once.
    """
    dtype = statistics_dtype(weight)
    grads = [torch.zeros_like(part.hidden, dtype=dtype) for part in rows]
    for columns in column_slices(len(rows[0].labels), options.num_ids, options.block_elements):
        block, summed = weight[columns], None
        for part, grad_hidden in zip(rows, grads, strict=True):
            grad_block = _block_gradient(part, block, options, columns)  # [R, C]
            if weight.dtype == dtype:
                grad_hidden.addmm_(grad_block, block)
            else:
                grad_hidden.add_(product(grad_block, block))
            if grad_weight is not None and len(rows) == 1:
                torch.mm(grad_block.t(), part.hidden, out=grad_weight[columns])
            elif grad_weight is not None:
                whole = product(grad_block.t(), part.hidden)  # [C, H]
                summed = whole if summed is None else summed.add_(whole)
        if grad_weight is not None and summed is not None:
            grad_weight[columns] = summed
    return [grad.to(weight.dtype) for grad in grads]


def _block_gradient(part: Rows, weight: Tensor, options: Options, columns: slice) -> Tensor:
    """Gradient to hidden @ weight.T of one block, [R, C] in the dtype of `weight`.

    With p = softmax(u), q = softmax(v): d logprob / du = onehot - p,
    d entropy / du = -p (u - logsumexp + H), d KL(p, q) / du = p (log p - log q - KL),
    d KL(q, p) / du = p - q. Summed: p (constant + varying), and what is no multiple of p.
    """
    scale, softcap = options.transform
    factor, found = scale / options.temperature, part.statistics
    grad_logprobs = part.grad_logprobs * factor
    index, inside = label_columns(part.labels, columns)
    onehot = torch.where(inside, grad_logprobs, 0.0)[:, None]

    u = block_logits(part.hidden, weight, options.transform, options.temperature)
    slope = None
    if softcap is not None:  # d tanh
        slope = 1 - (u * (options.temperature / softcap)).square_()
    constant, varying, apart = -grad_logprobs, None, None
    if options.with_entropy:
        grad_entropy = part.grad_entropy * factor
        constant = constant + grad_entropy * (found.logsumexp - found.entropy)
        varying = u * -grad_entropy[:, None]
    if options.reference is not None:
        grad_kl = part.grad_kl * factor
        v = reference_logits(options, part.place, columns, u)
        if options.reference.is_forward:
            constant = constant + grad_kl
            apart = v.sub_(found.reference_logsumexp[:, None]).exp_().mul_(-grad_kl[:, None])
        else:
            constant = constant - grad_kl * (found.logsumexp - found.reference_logsumexp + found.kl)
            difference = (u - v).mul_(grad_kl[:, None])
            varying = difference if varying is None else varying.add_(difference)
    du = u.sub_(found.logsumexp[:, None]).exp_()
    if varying is None:
        du.mul_(constant[:, None])
    else:
        du.mul_(varying.add_(constant[:, None]))
    if apart is not None:
        du.add_(apart)
    du.scatter_add_(1, index, onehot)
    if slope is not None:
        du.mul_(slope)
    return du.to(weight.dtype)
