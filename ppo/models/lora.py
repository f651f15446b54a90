"""Which layers of a model get adapters (LoRA), and with which values they begin.

Owns the choice by names, and the seed of A; B is zero, so that a run begins with the model as it
is. How an adapter computes is in sharding/adapters.py.
"""

import logging
from pathlib import Path
from zlib import crc32

import torch
from torch import nn

from ppo.config import ALL_LINEAR, Lora
from ppo.errors import InputError
from ppo.models.weights import local_box
from sharding.adapters import B, adapters_of, add_adapters, is_adapter, model_parameters
from sharding.checkpoint.base import fingerprint
from sharding.fsdp import local_shard
from sharding.mesh import Mesh

logger = logging.getLogger(__name__)


def attach(module: nn.Module, lora: Lora | None, path: Path, *, value_head: str = "") -> None:
    """Give a model on meta its adapters, without values. Before sharding; nothing without `lora`.

    value_head: name of a head that is trained as it is.
    Raises InputError for names that no linear layer has.
    """
    if lora is None:
        return
    linear = _linear_layers(module, value_head)
    layers = _chosen(linear, lora, path)
    add_adapters(
        module,
        layers,
        rank=lora.rank,
        scale=lora.alpha / lora.rank,
        dropout=lora.dropout,
        trained=[f"{value_head}.weight"] if value_head else [],
        description={
            "rank": lora.rank,
            "alpha": lora.alpha,
            "dropout": lora.dropout,
            "target_modules": _short_names(layers, linear),
            "base": str(path.resolve()),
            "dtype": _dtype_of(module),
        },
    )
    _say(module, layers, lora)


def fill(module: nn.Module, lora: Lora | None, mesh: Mesh) -> None:
    """First values of the adapters of a sharded model that is loaded. Collective.

    A is that of `nn.Linear` (uniform within 1 / sqrt(in), as peft's), from the seed and the name:
    the same however it is sharded.
    """
    adapters = adapters_of(module)
    if lora is None or adapters is None:
        return
    for name, parameter in module.named_parameters():
        if is_adapter(name):
            local = local_shard(parameter)
            if name.endswith(B):
                local.zero_()
            else:
                seed = (lora.seed << 32) + crc32(name.encode())
                whole = torch.empty(parameter.shape)
                bound = parameter.shape[1] ** -0.5
                whole.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
                local.copy_(whole[local_box(parameter)])
    base = {n: p for n, p in model_parameters(module).items() if n in adapters.base}
    adapters.description["fingerprint"] = fingerprint(base, mesh)


def _linear_layers(module: nn.Module, value_head: str) -> list[str]:
    """Names of all linear layers but heads."""
    head = None if value_head else module.get_output_embeddings()  # pyright: ignore
    return [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and part is not head and name != value_head
    ]


def _chosen(linear: list[str], lora: Lora, path: Path) -> list[str]:
    """Those that the keys name. Raises InputError for a name without a layer."""
    wanted, excluded = lora.target_modules, lora.exclude_modules
    for key, names in (("target", wanted), ("exclude", excluded)):
        for name in names:
            if name != ALL_LINEAR and not any(_is_called(layer, name) for layer in linear):
                leaves = ", ".join(sorted({layer.rpartition(".")[2] for layer in linear}))
                raise InputError(
                    f"{lora.section}.lora_{key}_modules: {path} has no linear layer {name!r}; it "
                    f"has {leaves or 'none'}"
                )
    found = [
        layer
        for layer in linear
        if any(_is_called(layer, name) for name in wanted)
        or (ALL_LINEAR in wanted and ".experts." not in layer)
    ]
    found = [layer for layer in found if not any(_is_called(layer, name) for name in excluded)]
    if not found:
        raise InputError(
            f"{lora.section}.lora_target_modules = {wanted}, lora_exclude_modules = {excluded}: "
            f"no linear layer of {path} gets an adapter"
        )
    return found


def _is_called(layer: str, name: str) -> bool:
    """Whether the full name of a layer ends with these parts."""
    return layer == name or layer.endswith(f".{name}")


def _short_names(layers: list[str], linear: list[str]) -> list[str]:
    """The last parts of the names where they mean these layers and no others, as engines like
    them; else the full names."""
    leaves = sorted({layer.rpartition(".")[2] for layer in layers})
    meant = [layer for layer in linear if layer.rpartition(".")[2] in leaves]
    return leaves if meant == layers else layers


def _say(module: nn.Module, layers: list[str], lora: Lora) -> None:
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    adapters = sum(size for name, size in sizes.items() if is_adapter(name))
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    left_out = experts and ALL_LINEAR in lora.target_modules
    logger.info(
        "%s: %d linear layers have adapters of rank %d: %.2f M parameters are trained, of %.1f M; "
        "embeddings, heads%s have none",
        *(lora.section, len(layers), lora.rank, adapters / 1e6, sum(sizes.values()) / 1e6),
        " and the experts of its mixtures" if left_out else "",
    )


def _dtype_of(module: nn.Module) -> str:
    """Of the frozen model, as torch calls it."""
    return str(next(module.parameters()).dtype).removeprefix("torch.")
