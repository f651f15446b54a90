"""Models and optimizers as flat tables of tensors, and back.

Owns the names in a checkpoint: `model.NAME.PARAMETER`, `optimizer.NAME.PARAMETER.STATE`,
`rng.RANK.DEVICE`. Every entry is a tensor, so that nothing has to be unpickled; numbers of the
optimizers' parameter groups are JSON. Must not know files.
"""

from collections.abc import Iterable, Mapping, Set
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sharding.adamw import EIGHT_BITS, SCALE, NarrowAdamW
from sharding.adapters import saved_names
from sharding.checkpoint.files import CheckpointError
from sharding.fsdp import local_shard
from sharding.host_memory import HostBlocks
from sharding.mesh import Mesh
from sharding.offload import forget_state, home_device, new_state

_IMPLEMENTATION = ("params", "fused", "foreach", "capturable", "differentiable")
"""Keys of a parameter group that are not saved: how it is computed, not what."""


def model_tensors(models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Parameters, tied ones once, and persistent buffers; of a model with adapters what is trained
    alone."""
    table = {}
    for name, module in models.items():
        saved = saved_names(module)
        parameters = dict(module.named_parameters())
        every = {key for key, _ in module.named_parameters(remove_duplicate=False)}
        buffers = {key: t for key, t in module.state_dict().items() if key not in every}
        for key, tensor in {**parameters, **buffers}.items():
            if saved is None or key in saved:
                table[f"model.{name}.{key}"] = tensor.detach()
    return table


def optimizer_tensors(
    models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
) -> dict[str, Tensor]:
    """State of every parameter that has one; empty before the first step."""
    table = {}
    for name, optimizer in optimizers.items():
        for key, parameter in _parameters(models[name], optimizer).items():
            for state, tensor in optimizer.state.get(parameter, {}).items():
                assert isinstance(tensor, Tensor), (name, key, state, type(tensor))
                table[f"optimizer.{name}.{key}.{state}"] = tensor
    return table


def optimizer_groups(
    models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
) -> dict[str, list[dict[str, Any]]]:
    """Parameter groups as JSON: hyperparameters and names of parameters."""
    return {
        name: [
            {
                **{k: _number(v) for k, v in group.items() if k not in _IMPLEMENTATION},
                "params": list(_parameters(models[name], optimizer, group)),
            }
            for group in optimizer.param_groups
        ]
        for name, optimizer in optimizers.items()
    }


def check_groups(
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    saved: Mapping[str, list[dict[str, Any]]],
) -> None:
    """Raise CheckpointError when an optimizer is not in the checkpoint, or groups otherwise.

    What a group says besides (learning rate, weight decay, ...) is for people: a configuration that
    has changed since must have its effect.
    """
    found = optimizer_groups(models, optimizers)
    for name in optimizers:
        if name not in saved:
            raise CheckpointError(f"holds no optimizer of {name}; it holds {sorted(saved)}")
        if [g["params"] for g in found[name]] != [g["params"] for g in saved[name]]:
            raise CheckpointError(f"the optimizer of {name} groups its parameters differently")


def optimizer_targets(
    models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], metadata: Metadata
) -> dict[str, Tensor]:
    """Tensors to load optimizer state into; afterwards the optimizers hold exactly what was saved.

    What is as large as its parameter takes its sharding and dtype, which are the configuration's.
    """
    table = {}
    for name, optimizer in optimizers.items():
        parameters = _parameters(models[name], optimizer)
        _check_codes(name, optimizer, metadata)
        saved = _saved_state(name, parameters, metadata)
        held = optimizer_tensors({name: models[name]}, {name: optimizer})
        if held.keys() - saved.keys():  # its host memory is given back as a whole
            forget_state(optimizer)
            held = {}
        table |= held
        missing = {entry: what for entry, what in saved.items() if entry not in held}
        makers = (_new_state(models[name], optimizer, *what) for what in missing.values())
        for (entry, what), tensor in zip(
            missing.items(), new_state(optimizer, makers), strict=True
        ):
            parameter, state, _ = what
            optimizer.state[parameter][state] = table[entry] = tensor
    return table


def _saved_state(
    name: str, parameters: Mapping[str, nn.Parameter], metadata: Metadata
) -> dict[str, tuple[nn.Parameter, str, TensorStorageMetadata]]:
    """Of each entry of an optimizer: whose state it is, which, and how it was. Raises
    CheckpointError."""
    found, prefix = {}, f"optimizer.{name}."
    for entry, saved in sorted(metadata.state_dict_metadata.items()):
        if entry.startswith(prefix):
            key, _, state = entry.removeprefix(prefix).rpartition(".")
            if key not in parameters:
                raise CheckpointError(f"{entry}: {name} has no such parameter")
            found[entry] = parameters[key], state, cast(TensorStorageMetadata, saved)
    return found


def _check_codes(name: str, optimizer: Optimizer, metadata: Metadata) -> None:
    """Raise CheckpointError where one of saved and configured moments are codes of 8 bits."""
    prefix = f"optimizer.{name}."
    saved = [entry for entry in metadata.state_dict_metadata if entry.startswith(prefix)]
    has_codes = any(entry.endswith(SCALE) for entry in saved)
    wants_codes = isinstance(optimizer, NarrowAdamW) and optimizer.state_dtype == EIGHT_BITS
    if saved and has_codes != wants_codes:
        was, wanted = ("in 8 bits", "others") if has_codes else ("as numbers", "8 bits")
        raise CheckpointError(
            f"holds Adam's moments of {name} {was}, and optim.state_dtype wants {wanted}: set it "
            "as it was"
        )


def _new_state(
    module: nn.Module,
    optimizer: Optimizer,
    parameter: Tensor,
    state: str,
    saved: TensorStorageMetadata,
) -> Tensor:
    device = home_device(module, parameter)
    if isinstance(optimizer, NarrowAdamW) and state in optimizer.state_names(parameter):
        return optimizer.empty_state(parameter, state, device)
    if saved.size == parameter.shape and state != "step":
        return torch.zeros_like(parameter, device=device, requires_grad=False)
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    on_device = group.get("fused") or group.get("capturable")
    dtype = saved.properties.dtype
    return torch.zeros(saved.size, dtype=dtype, device=device if on_device else "cpu")


def rng_tensors(rank: int) -> dict[str, Tensor]:
    """State of torch's random number generators of this rank."""
    table = {f"rng.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        table[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state()
    return table


def restore_rng(rank: int, table: Mapping[str, Tensor]) -> None:
    """Set what `rng_tensors` returned."""
    torch.set_rng_state(table[f"rng.{rank}.cpu"])
    if f"rng.{rank}.cuda" in table:
        torch.cuda.set_rng_state(table[f"rng.{rank}.cuda"])


def check_names(wanted: Iterable[str], metadata: Metadata) -> None:
    """Raise CheckpointError, with examples, when entries are missing."""
    missing = sorted(set(wanted) - set(metadata.state_dict_metadata))
    if missing:
        raise CheckpointError(f"lacks {len(missing)} tensors, for example {missing[0]}")


def written_here(table: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Of what every rank has, the part that this one writes: each replica writes some tensors.

    The same table on every rank. Torch would pick the writer of each shard too, but only once all
    have copied all of it.
    """
    loads = [0] * mesh.dims.dp_replicate
    mine = {}
    for name, tensor in table.items():
        writer = loads.index(min(loads))
        if isinstance(tensor, DTensor):
            loads[writer] += tensor.numel() * tensor.element_size()
            if writer == mesh.replicate_rank:
                mine[name] = tensor
        elif mesh.rank == 0:
            mine[name] = tensor
    return mine


class Staging:
    """Copies in host memory of what a save writes; the memory is kept for the next save."""

    def __init__(self) -> None:
        self._blocks = HostBlocks()
        self._buffers: dict[str, Tensor] = {}

    def copies(self, table: Mapping[str, Tensor], *, resting: Set[int]) -> dict[str, Tensor]:
        """The tensors, sharded as before, as they are now. Returns when they are complete.

        resting: storages of the host, by address, whose tensors are taken as they are.
        """
        local = {name: local_shard(tensor) for name, tensor in table.items()}
        away = {
            name: tensor
            for name, tensor in local.items()
            if tensor.untyped_storage().data_ptr() not in resting
        }
        self._take_memory(away)
        for name, tensor in away.items():
            host = self._buffers[name].view(tensor.dtype).view(tensor.shape)
            local[name] = host.copy_(tensor, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return {name: _sharded_as(tensor, local[name]) for name, tensor in table.items()}

    def _take_memory(self, tensors: Mapping[str, Tensor]) -> None:
        """Buffers for those that have none of their size."""
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
        new = {n: size for n, size in sizes.items() if _size(self._buffers.get(n)) != size}
        pinned = any(tensor.is_cuda for tensor in tensors.values())
        pieces = self._blocks.take([*new.values()], pinned=pinned)
        self._buffers |= dict(zip(new, pieces, strict=True))


def _size(buffer: Tensor | None) -> int | None:
    return None if buffer is None else len(buffer)


def _sharded_as(tensor: Tensor, local: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return local
    return DTensor(local, tensor._spec, requires_grad=False)  # pyright: ignore


def _parameters(
    module: nn.Module, optimizer: Optimizer, group: Mapping[str, Any] | None = None
) -> dict[str, nn.Parameter]:
    """The optimizer's (or one group's) parameters by name, in the module's order."""
    groups = optimizer.param_groups if group is None else [group]
    held = {id(p) for g in groups for p in g["params"]}
    return {name: p for name, p in module.named_parameters() if id(p) in held}


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
