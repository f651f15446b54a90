"""FSDP2 around a transformer: units, precision, prefetch, the norm of its gradients.

Owns how a module is cut into FSDP units: the transformer layers, and the root with what is left
(embedding, final norm, head). Parameter names stay those of the module. Must not know what the
module computes, nor how its weights are loaded.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from sharding.mesh import Mesh

logger = logging.getLogger(__name__)


def shard_model(
    module: nn.Module,
    mesh: Mesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool = True,
    forward_prefetch: bool = True,
    backward_prefetch: bool = True,
    offload_policy: bool = False,
    min_num_params: int = 0,
    forward_only: bool = False,
    shard_dim1: Callable[[str, nn.Parameter], bool] | None = None,
) -> None:
    """Apply FSDP2 in place. Parameters become DTensors, on meta too.

    Gradients are averaged over all ranks of the mesh, replicas and sp included.

    Args:
        module: a transformer, on meta or on the mesh's device.
        param_dtype: dtype of gathered parameters and of the computation.
        reduce_dtype: dtype of the reduction of gradients.
        reshard_after_forward: free gathered layers between forward and backward. The root (head)
            is needed first in the backward and stays.
        forward_prefetch: gather the next layer while one computes in the forward pass.
        backward_prefetch: gather the previous layer while one computes in the backward pass.
        offload_policy: parameters, gradients and optimizer live in host memory.
        min_num_params: modules inside a layer with at least so many parameters of their own become
            units too; 0 = none.
        forward_only: the module never runs backward: layers and root reshard after their forward.
        shard_dim1: for a parameter (by name) true = shard dim 1 where it divides evenly.

    Raises:
        ValueError: no transformer layers are found.
    """
    layers = transformer_layers(module)
    options: dict[str, Any] = {
        "mesh": mesh.fsdp,
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
        "shard_placement_fn": _placement(module, mesh.dims.shard_size, shard_dim1),
        "offload_policy": (
            CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
            if offload_policy
            else OffloadPolicy()
        ),
    }
    layer_units = []
    for layer in layers:
        units = [layer, *_large_modules(layer, min_num_params)]
        for unit in reversed(units):  # inner modules first
            fully_shard(
                unit, reshard_after_forward=reshard_after_forward or forward_only, **options
            )
        layer_units.append(units)
    fully_shard(module, reshard_after_forward=forward_only, **options)
    if forward_prefetch:
        _set_forward_prefetch([[module], *layer_units])
    if not forward_only:
        _set_backward_prefetch([[module], *layer_units], enabled=backward_prefetch)


def transformer_layers(module: nn.Module) -> list[nn.Module]:
    """The layers of a Hugging Face transformer, in forward order.

    They are the members of ModuleLists whose classes the model declares as not to be split;
    where it declares none, those of the ModuleList with the most parameters.

    Raises:
        ValueError: there are none.
    """
    declared = {
        name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()
    }
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    layers = [
        member
        for part in lists
        for member in part
        if declared.intersection(cls.__name__ for cls in type(member).__mro__)
    ]
    if not layers and lists:
        layers = list(max(lists, key=lambda part: sum(p.numel() for p in part.parameters())))
    if not layers:
        raise ValueError(
            f"{type(module).__name__}: no ModuleList holds any of the layer classes "
            f"{sorted(declared)} of _no_split_modules"
        )
    return layers


def _large_modules(layer: nn.Module, min_num_params: int) -> list[nn.Module]:
    """Modules inside the layer to wrap, outer before inner; what inner ones wrap counts there."""
    if min_num_params == 0:
        return []
    found: list[nn.Module] = []
    wrapped: set[nn.Parameter] = set()
    for part in reversed([m for m in layer.modules() if m is not layer]):
        if isinstance(part, nn.ModuleList | nn.ModuleDict):  # they have no forward
            continue
        own = [p for p in part.parameters() if p not in wrapped]
        if sum(p.numel() for p in own) >= min_num_params:
            wrapped.update(own)
            found.append(part)
    return found[::-1]


def _placement(
    module: nn.Module, shard_size: int, wanted: Callable[[str, nn.Parameter], bool] | None
) -> Callable[[nn.Parameter], Shard | None] | None:
    """FSDP2's shard_placement_fn: dim 1 for the wanted parameters that divide evenly."""
    if wanted is None:
        return None
    chosen = {name: p for name, p in module.named_parameters() if wanted(name, p)}
    uneven = [n for n, p in chosen.items() if p.ndim < 2 or p.shape[1] % shard_size]
    if uneven:
        logger.info(
            "%d parameters stay sharded on dim 0, dim 1 does not divide by %d ranks: %s ...",
            len(uneven),
            shard_size,
            uneven[0],
        )
    on_dim1 = {p for name, p in chosen.items() if name not in uneven}
    return lambda parameter: Shard(1) if parameter in on_dim1 else None


def _set_forward_prefetch(groups: list[list[nn.Module]]) -> None:
    """Every group of units, in forward order, gathers the next one when it starts."""
    for (first, *_), following in pairwise(groups):
        cast(FSDPModule, first).set_modules_to_forward_prefetch(cast(list[FSDPModule], following))


def _set_backward_prefetch(groups: list[list[nn.Module]], *, enabled: bool) -> None:
    """The root gathers the last layer, each layer the one before it.

    Without a list FSDP2 prefetches by itself; a unit that names itself prefetches nothing.
    """
    root, *layers = groups
    order = [root, *reversed(layers)]
    for (first, *_), following in zip(order, [*order[1:], order[-1]], strict=True):
        target = following if enabled else [first]
        cast(FSDPModule, first).set_modules_to_backward_prefetch(cast(list[FSDPModule], target))


def gradient_norm(
    module: nn.Module, device: torch.device, local: list[Tensor] | None = None
) -> Tensor:
    """2-norm of all gradients, [] on the device, the same on every rank. Collective.

    One all-reduce over the shard group, on the device also where gradients are on the host (torch's
    clip_grad_norm_ would ask for a backend of host tensors there).

    local: gradients of this rank's shards; None = those that the parameters hold.
    """
    if local is None:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        local = [local_shard(gradient) for gradient in gradients]
    squares = nn.utils.get_total_norm(local).to(device, torch.float64).square()
    first = next(p for p in module.parameters() if p.requires_grad)
    if isinstance(first, DTensor):
        dist.all_reduce(squares, group=first.device_mesh.get_group(mesh_dim=-1))
    return squares.sqrt().float()


def local_shard(tensor: Tensor) -> Tensor:
    """The memory of this rank's shard, or of a tensor that is not sharded, to be read or written
    in place."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def reshard(module: nn.Module) -> None:
    """Free gathered parameters, so that `module.parameters()` are the sharded DTensors."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


@contextmanager
def without_gradients(module: nn.Module) -> Iterator[None]:
    """No gradients; at the end gathered parameters are freed.

    FSDP2 records every forward for the backward to come and forgets only there, so that a module
    that never runs backward would collect records for ever: they are dropped here. Not for use
    between the micro-batches of an update: partial sums of gradients over replicas go with them.
    """
    try:
        with torch.no_grad():
            yield
    finally:
        reshard(module)
        if hasattr(module, "reset_iter_state"):  # torch 2.14 has it
            root = cast(FSDPModule, module)
            # what it resets is made by the first forward, which a stop may have come before
            if root._get_fsdp_state()._is_root is not None:
                root.reset_iter_state()
