"""Ulysses sequence parallelism: all-to-all from sequence slices to head slices around attention.

Owns the exchange over one sp group (Jacobs et al. 2023, arXiv 2309.14509): outside attention each
rank holds 1/sp of the row with all heads, inside it holds the whole row with 1/sp of the heads.
Must not know how attention is computed, nor anything of models or training.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def ulysses_problems(*, num_heads: int, sp: int) -> list[str]:
    """Reasons why attention heads cannot be spread over `sp` ranks; empty when they can."""
    if num_heads % sp == 0:
        return []
    possible = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
    return [f"{num_heads} attention heads do not divide by {sp}; possible: {possible}"]


def scatter_heads(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange this rank's slice of the row for its slice of the heads, in one collective.

    query [n, h, d], key [n, k, d], value [n, k, e] -> [sp * n, h / sp, d] and so on; n is equal on
    all ranks. kv heads are repeated as often as needed to give every rank at least one. The query
    heads of a rank still use its kv heads in equal groups. Differentiable.
    Raises ValueError when sp does not divide the query heads.
    """
    sp = dist.get_world_size(group)
    if problems := ulysses_problems(num_heads=query.shape[1], sp=sp):
        raise ValueError(problems[0])
    repeats = kv_repeats(num_heads=query.shape[1], num_kv_heads=key.shape[1], sp=sp)
    tensors = [
        query,
        *(t.repeat_interleave(repeats, 1) if repeats > 1 else t for t in (key, value)),
    ]
    parts = [t.unflatten(1, (sp, -1)).flatten(2) for t in tensors]  # [n, sp, h / sp * d]
    widths = [p.shape[2] for p in parts]
    sent = torch.cat(parts, 2).transpose(0, 1).contiguous()  # [sp, n, widths]
    received = exchange(sent, group).flatten(0, 1)  # [sp * n, widths]
    q, k, v = (
        part.unflatten(1, (-1, t.shape[2]))
        for part, t in zip(received.split(widths, 1), tensors, strict=True)
    )
    return q, k, v


def gather_heads(output: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Undo scatter_heads on the output: [sp * n, h / sp, e] -> [n, h, e]. Differentiable."""
    sp = dist.get_world_size(group)
    sent = output.unflatten(0, (sp, -1)).contiguous()  # [sp, n, h / sp, e]
    return exchange(sent, group).transpose(0, 1).flatten(1, 2)


def kv_repeats(*, num_heads: int, num_kv_heads: int, sp: int) -> int:
    """Smallest repetition of kv heads that spreads evenly over sp and over the query heads."""
    groups = num_heads // num_kv_heads
    return next(r for r in range(1, groups + 1) if groups % r == 0 and (num_kv_heads * r) % sp == 0)


def exchange(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send tensor[i] to rank i of the group and stack what comes back by rank. Differentiable."""
    return _AllToAll.apply(tensor, group)


class _AllToAll(torch.autograd.Function):
    """all_to_all_single over equal parts of dim 0; it is its own transpose."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(tensor)
        dist.all_to_all_single(received, tensor, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grad.contiguous(), ctx.group), None
