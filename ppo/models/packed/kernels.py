"""Kernels of causal attention over packed documents, and which one a device and a setting take.

Must not know transformers, ranks or models.

Layout: query [N, h, d], key and value [N, k, d] with the documents one after another.
"""

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ppo.errors import InputError
from ppo.models.packed.attention import Documents, Kernel
from ppo.models.packed.sinks import FlashKernel, attend_with_sinks

# Rows of queries whose scores exist at a time where no kernel does the work (window, softcap).
QUERY_BLOCK = 256


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


def varlen_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """torch.nn.attention.varlen where it can: CUDA, half precision, no softcap, heads of one size
    that is a multiple of 8 up to 256. Elsewhere each document alone."""
    size = query.shape[-1]
    fits = size <= 256 and size % 8 == 0 and size == value.shape[-1]
    if softcap is not None or not fits or query.dtype not in (torch.bfloat16, torch.float16):
        return sdpa_kernel(
            query, key, value, documents, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
    gqa = query.shape[1] != key.shape[1]
    if sinks is not None:
        pair = varlen_pair(documents, scale=scale, window=window, gqa=gqa)
        return attend_with_sinks(query, key, value, sinks, pair)
    output = _varlen(documents, scale=scale, window=window, gqa=gqa)(query, key, value)
    assert isinstance(output, Tensor)
    return output


def _varlen(
    documents: Documents, *, scale: float, window: int | None, gqa: bool, **options: Any
) -> Callable[[Tensor, Tensor, Tensor], Any]:
    """torch's varlen attention as a function of query, key and value."""
    from torch.nn.attention.varlen import varlen_attn

    options |= {"scale": scale, "window_size": _flash_window(window)}
    if gqa and _must_ask_for_gqa():
        options["enable_gqa"] = True
    bounds = _varlen_bounds(documents)
    return lambda query, key, value: varlen_attn(query, key, value, *bounds, **options)


@cache
def _must_ask_for_gqa() -> bool:
    """torch 2.11 takes fewer heads of keys as they are, and knows no option for it."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _varlen_bounds(documents: Documents) -> tuple[Tensor, Tensor, int, int]:
    longest = max(documents.lengths)
    return documents.bounds, documents.bounds, longest, longest


def varlen_pair(
    documents: Documents, *, scale: float, window: int | None, gqa: bool
) -> FlashKernel:
    """Both passes of torch's varlen attention; it has no public name for the second."""
    from torch.nn.attention.varlen import AuxRequest

    aux = AuxRequest(lse=True)
    forward = _varlen(documents, scale=scale, window=window, gqa=gqa, return_aux=aux)
    bounds, sides = _varlen_bounds(documents), _flash_window(window)

    def backward(*tensors: Tensor) -> Any:
        unused = torch.zeros(2, dtype=torch.uint64, device=documents.bounds.device)  # of dropout
        causal = sides == (-1, 0)  # as varlen_attn says it
        return torch.ops.torch_attn._varlen_attn_backward(
            *tensors, *bounds, causal, unused, scale, list(sides)
        )

    return FlashKernel(forward, backward)


def flash_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The flash-attn package: CUDA, half precision, softcap included. Sinks as `varlen_kernel`."""
    if sinks is not None:
        return varlen_kernel(
            query, key, value, documents, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
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
    sinks: Tensor | None = None,
) -> Tensor:
    """Each document alone; documents of one length share a call. No mask as large as a document."""
    lengths = documents.lengths
    if len(set(lengths)) == 1:  # padded rows, or a single document
        parts = [tuple(t.unflatten(0, (len(lengths), -1)) for t in (query, key, value))]
    else:  # split, not slices: its backward is one concatenation
        split = (t.split(lengths) for t in (query, key, value))
        parts = [tuple(t[None] for t in part) for part in zip(*split, strict=True)]
    outputs = [
        _attend(*part, scale=scale, window=window, softcap=softcap, sinks=sinks) for part in parts
    ]
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
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of documents of one length: [D, L, h, d] -> [D, L, h, d]."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))  # [D, h, L, d]
    length = q.shape[2]
    if window is not None and window >= length:
        window = None
    if softcap is None and window is None and sinks is None:
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
            sinks,
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
    sinks: Tensor | None,
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
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=scale, enable_gqa=gqa
        )
    repeats = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(repeats, 1) if repeats > 1 else t for t in (k, v))
    scores = (q @ k.mT) * scale  # [D, h, block, keys]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat(
            [scores, sinks.to(q.dtype)[:, None, None].expand(*scores.shape[:-1], 1)], -1
        )
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return weights[..., : k.shape[2]].to(q.dtype) @ v
