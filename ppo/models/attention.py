"""Causal attention over packed documents, as a function of transformers' AttentionInterface.

Owns the choice of kernel and the bounds of documents. One `Documents` object travels through the
backbone's keyword arguments to every layer, so that no state is global. Must not know models,
losses or how rows were packed.

Layout inside: query [N, h, d], key and value [N, k, d] with the documents one after another.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ppo.errors import InputError
from sharding.ulysses import gather_heads, scatter_heads

ATTENTION_NAME = "packed_documents"
"""name under which transformers finds `packed_attention`"""

# Rows of queries whose scores exist at a time where no kernel does the work (window, softcap).
QUERY_BLOCK = 256

Kernel = Callable[..., Tensor]
"""f(query, key, value, documents, *, scale, window, softcap) -> [N, h, d]"""


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


def choose_kernel(implementation: str, device: torch.device) -> Kernel | None:
    """Kernel for `model.attn_implementation`; None = a name of transformers that cannot pack.

    auto and varlen: torch's varlen attention on CUDA, else each document alone; sdpa: each document
    alone; flash_attention_2: the flash-attn package.
    Raises InputError when flash-attn is asked for and not installed.
    """
    if implementation in ("auto", "varlen"):
        return varlen_kernel if device.type == "cuda" else sdpa_kernel
    if implementation == "sdpa":
        return sdpa_kernel
    if implementation == "flash_attention_2":
        _flash_function()
        return flash_kernel
    return None


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
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [b, h, S, d] -> output [b, S, h, d].

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
    if documents.sp_group is not None:
        q, k, v = scatter_heads(q, k, v, documents.sp_group)  # [sp * n, h / sp, d]
    output = documents.kernel(
        q, k, v, documents, scale=scale, window=sliding_window, softcap=softcap
    )
    if documents.sp_group is not None:
        output = gather_heads(output, documents.sp_group)
    return output.unflatten(0, (query.shape[0], -1)), None


def varlen_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """torch.nn.attention.varlen where it can: CUDA, half precision, no softcap, heads of one size
    that is a multiple of 8 up to 256. Elsewhere each document alone."""
    size = query.shape[-1]
    fits = size <= 256 and size % 8 == 0 and size == value.shape[-1]
    if softcap is not None or not fits or query.dtype not in (torch.bfloat16, torch.float16):
        return sdpa_kernel(
            query, key, value, documents, scale=scale, window=window, softcap=softcap
        )
    from torch.nn.attention.varlen import varlen_attn

    longest = max(documents.lengths)
    options: dict[str, Any] = {"scale": scale, "window_size": _flash_window(window)}
    if query.shape[1] != key.shape[1] and _must_ask_for_gqa():
        options["enable_gqa"] = True
    output = varlen_attn(
        query, key, value, documents.bounds, documents.bounds, longest, longest, **options
    )
    assert isinstance(output, Tensor)
    return output


@cache
def _must_ask_for_gqa() -> bool:
    """torch 2.11 takes fewer heads of keys as they are, and knows no option for it."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def flash_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """The flash-attn package: CUDA, half precision, softcap included."""
    longest = max(documents.lengths)
    return _flash_function()(
        query,
        key,
        value,
        documents.bounds,
        documents.bounds,
        longest,
        longest,
        softmax_scale=scale,
        causal=True,
        window_size=_flash_window(window),
        softcap=softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def _flash_function() -> Callable[..., Tensor]:
    try:
        # Not `import flash_attn`: other packages put folders of their own under that name.
        return importlib.import_module("flash_attn").flash_attn_varlen_func
    except (ImportError, AttributeError) as error:
        raise InputError(
            "model.attn_implementation=flash_attention_2: the package flash-attn is not installed; "
            "use auto"
        ) from error


def _flash_window(window: int | None) -> tuple[int, int]:
    """flash counts the tokens to the left; transformers' window includes the token itself."""
    return (-1 if window is None else window - 1), 0


def sdpa_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Each document alone; documents of one length share a call. No mask as large as a document."""
    lengths = documents.lengths
    if len(set(lengths)) == 1:  # padded rows, or a single document
        parts = [tuple(t.unflatten(0, (len(lengths), -1)) for t in (query, key, value))]
    else:  # split, not slices: its backward is one concatenation
        split = (t.split(lengths) for t in (query, key, value))
        parts = [tuple(t[None] for t in part) for part in zip(*split, strict=True)]
    outputs = [_attend(*part, scale=scale, window=window, softcap=softcap) for part in parts]
    return (
        torch.cat([o.flatten(0, 1) for o in outputs])
        if len(outputs) > 1
        else outputs[0].flatten(0, 1)
    )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal attention of documents of one length: [D, L, h, d] -> [D, L, h, d]."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))  # [D, h, L, d]
    length = q.shape[2]
    if window is not None and window >= length:
        window = None
    if softcap is None and window is None:
        gqa = q.shape[1] != k.shape[1]
        output = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=gqa
        )
        return output.transpose(1, 2)
    blocks = [
        checkpoint(
            _attend_block,
            q,
            k,
            v,
            start,
            scale,
            window,
            softcap,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for start in range(0, length, QUERY_BLOCK)
    ]
    return torch.cat(blocks, 2).transpose(1, 2)  # pyright: ignore[reportArgumentType]


def _attend_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Queries [start, start + QUERY_BLOCK) against the keys that they may see: [D, h, block, d]."""
    stop = min(start + QUERY_BLOCK, q.shape[2])
    first = 0 if window is None else max(start - window + 1, 0)
    rows = torch.arange(start, stop, device=q.device)[:, None]
    columns = torch.arange(first, stop, device=q.device)
    visible = columns <= rows
    if window is not None:
        visible &= columns > rows - window
    q, k, v = q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop]
    gqa = q.shape[1] != k.shape[1]
    if softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=scale, enable_gqa=gqa
        )
    repeats = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(repeats, 1) if repeats > 1 else t for t in (k, v))
    scores = torch.tanh((q @ k.mT) * (scale / softcap)) * softcap  # [D, h, block, keys]
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1, dtype=torch.float32)
    return weights.to(q.dtype) @ v
