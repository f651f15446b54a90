"""What the layers of a transformer keep for their backward pass: recomputed, or on the host.

Owns how a layer's forward is wrapped for it. Must not know FSDP or what a layer computes.

Order: `checkpoint_activations`, `offload_activations` (so that what is moved is the input alone),
then sharding/fsdp.py's `shard_model`, which hooks the wrapped forward.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from sharding.fsdp import transformer_layers

MIN_OFFLOADED_BYTES = 1 << 20
"""Smaller activations stay on the device: the copy would cost more than it frees."""


def checkpoint_activations(module: nn.Module) -> None:
    """Keep only the inputs of every layer, and run its forward again in the backward pass."""
    for layer in transformer_layers(module):
        layer.forward = partial(_checkpointed, layer.forward)


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


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
