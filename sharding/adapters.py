"""Low-rank adapters on linear layers of a frozen model: y = W x + s B A x (arXiv 2106.09685, LoRA).

Owns what an adapter is inside a module (parameters `lora_A` [r, in] and `lora_B` [out, r] beside
`weight`, a forward that adds them), the switch that leaves them out, and which parameters are the
frozen base. Names of the base stay as they are. Must not know which layers are given one, nor what
is done with the merged weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

A, B = "lora_A", "lora_B"
"""names of an adapter's parameters in their layer, [r, in] and [out, r]"""


@dataclass(kw_only=True, eq=False)
class Adapters:
    """The adapters of one module, which holds them as `low_rank_adapters`."""

    layers: tuple[str, ...]
    """full names of the linear layers that have one"""
    scale: float
    """s, of B A"""
    dropout: float
    """of what A sees, where gradients are recorded"""
    base: frozenset[str]
    """names of the parameters that are frozen"""
    description: dict[str, Any]
    """JSON: what a checkpoint says of them"""
    enabled: bool = True
    """whether a forward pass adds them"""
    in_place: bool = True
    """whether they are added to the very output of their layer; not where that is kept"""


def add_adapters(
    module: nn.Module,
    layers: Sequence[str],
    *,
    rank: int,
    scale: float,
    dropout: float = 0.0,
    trained: Sequence[str] = (),
    description: dict[str, Any],
) -> Adapters:
    """Give the named `nn.Linear` layers float32 adapters without values, where their weights are.

    Before sharding. All other parameters are the frozen base, but for those named in `trained`.
    """
    adapters = Adapters(
        layers=tuple(layers),
        scale=scale,
        dropout=dropout,
        base=frozenset(name for name, _ in module.named_parameters()) - set(trained),
        description=description,
    )
    for name in layers:
        layer = module.get_submodule(name)
        assert isinstance(layer, nn.Linear), (name, type(layer))
        options: dict[str, Any] = {"device": layer.weight.device, "dtype": torch.float32}
        layer.register_parameter(A, nn.Parameter(torch.empty(rank, layer.in_features, **options)))
        layer.register_parameter(B, nn.Parameter(torch.empty(layer.out_features, rank, **options)))
        layer.forward = partial(_forward, layer, layer.forward, adapters)  # pyright: ignore
    module.low_rank_adapters = adapters  # pyright: ignore
    return adapters


def _forward(layer: nn.Module, forward: Any, adapters: Adapters, x: Tensor) -> Tensor:
    """W x + s B A x, in the dtype of x. With adapters off it is bitwise the layer's own."""
    output = forward(x)
    if not adapters.enabled:
        return output
    if adapters.dropout and torch.is_grad_enabled():
        x = F.dropout(x, adapters.dropout)
    low = F.linear(F.linear(x, getattr(layer, A)), getattr(layer, B))
    if not adapters.in_place:
        return output.add(low, alpha=adapters.scale)
    return output.add_(low, alpha=adapters.scale)  # no other tensor of this width


def adapters_of(module: nn.Module) -> Adapters | None:
    """The adapters of a module; None where all of it is trained, or frozen."""
    return getattr(module, "low_rank_adapters", None)


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Passes of the model as it was before it had any."""
    adapters = adapters_of(module)
    assert adapters is not None and adapters.enabled
    adapters.enabled = False
    try:
        yield
    finally:
        adapters.enabled = True


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return name.rpartition(".")[2] in (A, B)


def model_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the model itself, by name, tied ones once: without those of adapters."""
    return {name: p for name, p in module.named_parameters() if not is_adapter(name)}


def saved_names(module: nn.Module) -> set[str] | None:
    """Names of the parameters that a checkpoint holds; None = all, and buffers too."""
    adapters = adapters_of(module)
    if adapters is None:
        return None
    return {name for name, _ in module.named_parameters()} - adapters.base


def freeze_base(module: nn.Module) -> None:
    """No gradients for what is not trained beside or in adapters."""
    adapters = adapters_of(module)
    for name in adapters.base if adapters is not None else ():
        module.get_parameter(name).requires_grad_(False)
