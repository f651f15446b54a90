"""What the layers of a transformer keep for their backward pass: recomputed, or on the host.

Owns how a layer's forward is wrapped for it, and which results are worth keeping. Must not know
FSDP.

Order: `block_mlps`, `checkpoint_activations`, `offload_activations` (so that what is moved is the
input alone), then sharding/fsdp.py's `shard_model`, which hooks the wrapped forward.
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from sharding.fsdp import transformer_layers

MIN_OFFLOADED_BYTES = 1 << 20
"""Smaller activations stay on the device: the copy would cost more than it frees."""
MLP_NAMES = ("mlp", "feed_forward", "block_sparse_moe", "ffn")
"""what transformers' layers call their MLP"""
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "_grouped_mm"))
_IN_BLOCK: ContextVar[bool] = ContextVar("in a block of rows", default=False)


def checkpoint_activations(
    module: nn.Module, *, selective: bool = False, draws: bool = False
) -> None:
    """Keep only the inputs of every layer, and run its forward again in the backward pass.

    Args:
        selective: keep also what matrix products and attention give, so that what runs again
            (norms, rotation, activation) takes next to no time.
        draws: layers draw random numbers, which have to be the same again. Otherwise the
            generators are left alone: reading their state makes the host wait for a device.
    """
    for layer in transformer_layers(module):
        layer.forward = partial(_checkpointed, layer.forward, selective, draws)


def _checkpointed(
    forward: Callable[..., Any], selective: bool, draws: bool, *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    options: dict[str, Any] = {}
    if selective:
        hidden = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)).shape[-1]
        policy = partial(_policy, hidden)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(
        forward, *args, use_reentrant=False, preserve_rng_state=draws, **options, **kwargs
    )


def _policy(hidden: int, _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether an operation of a layer with inputs [..., hidden] is worth the memory of its result.

    A product of [N, K] and [K, M] takes 2 K operations for each number that is kept: those with a
    small K (adapters, the scores of a head) run again. Nothing needs the last product of an MLP,
    which brings a width of several times `hidden` back to it, before the layer's own output.
    """
    name = op.__name__.partition(".")[0]
    keeps = False
    if _IN_BLOCK.get():
        pass
    elif name in _PRODUCTS:
        inner, outer = args[-1 if name == "addmm" else 1].shape[-2:]
        keeps = 2 * inner > hidden and not (outer == hidden and inner >= 2 * hidden)
    else:
        keeps = "attention" in name or "attn" in name
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def block_mlps(module: nn.Module, rows: int, *, draws: bool = False) -> None:
    """Let the MLP of every layer see at most so many tokens at once, and keep none of its inside.

    What is as wide as an MLP then exists for `rows` tokens; its forward runs again in the backward
    pass. Outputs are those of the whole, and gradients up to the order of a sum. `draws`: as above.

    Raises:
        ValueError: a layer has no MLP of a name that is known.
    """
    for layer in transformer_layers(module):
        mlp = next((m for n, m in layer.named_children() if n in MLP_NAMES), None)
        if mlp is None:
            names = ", ".join(name for name, _ in layer.named_children())
            raise ValueError(f"{type(layer).__name__} has no {' or '.join(MLP_NAMES)}, but {names}")
        mlp.forward = partial(_in_blocks, mlp.forward, rows, draws)


def _in_blocks(forward: Callable[[Tensor], Any], rows: int, draws: bool, x: Tensor) -> Tensor:
    """The MLP of x, [..., H], by blocks [1, rows, H]."""
    blocks = x.flatten(0, -2)[None].split(rows, dim=1)
    if len(blocks) == 1:
        return forward(x)
    outside = _IN_BLOCK.set(True)
    try:
        outputs = [_block(forward, draws, block) for block in blocks]
    finally:
        _IN_BLOCK.reset(outside)
    return torch.cat(outputs, dim=1).view(x.shape)


def _block(forward: Callable[[Tensor], Any], draws: bool, block: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(block)
    return checkpoint(forward, block, use_reentrant=False, preserve_rng_state=draws)


def offload_activations(module: nn.Module, *, min_bytes: int = MIN_OFFLOADED_BYTES) -> None:
    """Keep what every layer saves for its backward in pinned host memory instead of on the device.

    With checkpointing that is the layer's input alone. No effect on tensors of the host.
    """
    for layer in transformer_layers(module):
        layer.forward = partial(_offloaded, layer.forward, layer, min_bytes)


def _offloaded(
    forward: Callable[..., Any], layer: nn.Module, min_bytes: int, *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    saver = HostSaver(layer, min_bytes)
    with saved_tensors_hooks(saver.pack, saver.unpack):
        return forward(*args, **kwargs)


class HostSaver:
    """Copies what a layer saves for backward to pinned host memory and back, without a host sync.

    The way out runs on a side stream beside the computation. Parameters stay where they are:
    FSDP frees and gathers them itself.
    """

    def __init__(self, layer: nn.Module, min_bytes: int):
        self._layer = layer
        self._min_bytes = min_bytes

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps: the tensor, or (device, host copy, event of the copy)."""
        small = tensor.numel() * tensor.element_size() < self._min_bytes
        if small or not tensor.is_cuda or self._is_parameter(tensor):
            return tensor
        stream = _side_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        return tensor.device, host, stream.record_event()

    def unpack(self, packed: Any) -> Tensor:
        """The tensor, on its device."""
        if isinstance(packed, Tensor):
            return packed
        device, host, copied = packed
        torch.cuda.current_stream(device).wait_event(copied)
        return host.to(device, non_blocking=True)

    def _is_parameter(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()._cdata
        return any(p.untyped_storage()._cdata == storage for p in self._layer.parameters())


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
