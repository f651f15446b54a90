"""An adapter as peft writes it: adapter_config.json and adapter_model.safetensors.

Owns which of them are read here, and the way of their tensors into a model that has such adapters
(`lora.attach`). What writes them is sharding/checkpoint/adapters.py.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from ppo.config import Lora
from ppo.errors import InputError
from ppo.models.weights import local_box
from sharding.adapters import A, is_adapter
from sharding.checkpoint.wrapped import text_name
from sharding.fsdp import local_shard

CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"
_PREFIX, _SUFFIX = "base_model.model.", ".weight"
# What would change what an adapter computes, and the values with which it changes nothing.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": ([], None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
}


def is_peft_folder(path: Path) -> bool:
    """Whether peft would load it."""
    return (path / CONFIG).is_file()


def read_lora(path: Path) -> Lora:
    """Which adapters the folder holds. Raises InputError for what is not read here."""
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        with safe_open(path / _TENSORS, "pt") as file:
            names = sorted(_own_name(name) for name in file.keys())  # noqa: SIM118
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise InputError(f"{path}: is no adapter of peft: {error!r}") from error
    for key, plain in _PLAIN.items():
        if config.get(key, plain[0]) not in plain:
            raise InputError(
                f"{path / CONFIG}: {key} = {config[key]!r} is not read here; merge the adapter "
                "with peft (merge_and_unload) and give the folder of the whole model"
            )
    return Lora(
        section=str(path),
        rank=rank,
        alpha=alpha,
        target_modules=[name.removesuffix(f".{A}") for name in names if name.endswith(f".{A}")],
        exclude_modules=[],
        dropout=0.0,
        seed=0,
    )


def load_adapter(module: nn.Module, path: Path) -> None:
    """The tensors of the folder into the adapters of a (sharded) module.

    Raises InputError where they are not those that the module has.
    """
    own = {name: p for name, p in module.named_parameters() if is_adapter(name)}
    with safe_open(path / _TENSORS, "pt") as file:
        theirs = {_own_name(name): name for name in file.keys()}  # noqa: SIM118
        shapes = {name: list(p.shape) for name, p in own.items()}
        found = {name: file.get_slice(full).get_shape() for name, full in theirs.items()}
        differs = sorted(
            name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name)
        )
        if differs:
            first = differs[0]
            raise InputError(
                f"{path}: is not an adapter of this model: {first} is {found.get(first)} there and "
                f"{shapes.get(first)} here"
            )
        for name, parameter in own.items():
            local_shard(parameter).copy_(file.get_slice(theirs[name])[local_box(parameter)])


def _own_name(name: str) -> str:
    """base_model.model.LAYER.lora_A.weight is LAYER.lora_A, in the language model of a multimodal
    one too."""
    name = name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
    return text_name(name) or name
