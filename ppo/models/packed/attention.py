"""Causal attention over packed documents, as a function of transformers' AttentionInterface.

Owns the bounds of documents, and the exchange of heads around attention. One `Documents` object
travels through the backbone's keyword arguments to every layer, so that no state is global. Must
not know kernels (kernels.py), models, losses or how rows were packed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ppo.errors import InputError
from sharding.ulysses import gather_heads, scatter_heads

ATTENTION_NAME = "packed_documents"
"""name under which transformers finds `packed_attention`"""

Kernel = Callable[..., Tensor]
"""f(query, key, value, documents, *, scale, window, softcap, sinks=None) -> [N, h, d]"""


@dataclass(frozen=True)
class Documents:
    """Where documents start and end in the row that attention sees, and how they are attended."""

    lengths: tuple[int, ...]
    """tokens of each document of the whole row (over all sp ranks)"""
    bounds: Tensor
    """[D + 1] int32 on the device: cumulative lengths"""
    kernel: Kernel
    sp_group: dist.ProcessGroup | None = None
    """the ranks that hold one slice of the row each; None = this rank holds the row"""


def register() -> None:
    """Make `packed_attention` known to transformers; may be called any number of times."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, packed_attention)


def make_documents(
    cu_seqlens: Tensor,
    device: torch.device,
    kernel: Kernel,
    sp_group: dist.ProcessGroup | None = None,
) -> Documents:
    """Documents from cumulative lengths [D + 1] on the host; nothing waits for the device."""
    lengths = tuple(n for n in cu_seqlens.diff().tolist() if n)
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    if device.type == "cuda":
        bounds = bounds.pin_memory().to(device, non_blocking=True)
    return Documents(lengths, bounds, kernel, sp_group)


@torch.compiler.disable  # bounds and lengths are new in every micro-batch; it is a kernel already
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    documents: Documents | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [b, h, S, d] -> output [b, S, h, d].

    s_aux: sinks [h], one more score of each head in the softmax, without a value.

    Rows are packed documents or right-padded sequences: with causal attention no real token sees
    the padding, so no mask is needed and none is taken.
    Raises InputError for a family whose layers do not say where documents end, or mask by
    themselves.
    """
    if documents is None or attention_mask is not None:
        lacking = "where documents end" if documents is None else "its attention without a mask"
        raise InputError(
            f"{type(module).__name__} is not told {lacking}: set "
            "model.attn_implementation=eager, with which sequences are padded"
        )
    assert dropout == 0.0, dropout
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))  # [n, h, d]
    sinks = s_aux
    if documents.sp_group is not None:
        q, k, v = scatter_heads(q, k, v, documents.sp_group)  # [sp * n, h / sp, d]
        if sinks is not None:
            sinks = sinks.unflatten(0, (-1, q.shape[1]))[dist.get_rank(documents.sp_group)]
    output = documents.kernel(
        q, k, v, documents, scale=scale, window=sliding_window, softcap=softcap, sinks=sinks
    )
    if documents.sp_group is not None:
        output = gather_heads(output, documents.sp_group)
    return output.unflatten(0, (query.shape[0], -1)), None
