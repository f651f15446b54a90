"""Names of a module's tensors: tied parameters, those of a layer, buffers that are weights.

Owns the rules of what is tied (the same object under several names), what belongs together, and
what a checkpoint holds. Must not know checkpoints or engines.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

_LAYER = re.compile(r"^.*?\.\d+\.")


def parameter_names(module: nn.Module) -> list[list[str]]:
    """All names of each distinct parameter, in the order of the module; several where it is tied.

    The first is the one that `named_parameters` gives.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def tied_names(module: nn.Module) -> list[list[str]]:
    """The names of each tied parameter, as in `parameter_names`."""
    return [names for names in parameter_names(module) if len(names) > 1]


def non_persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that no checkpoint holds, by full name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, owner in module.named_modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if name in owner._non_persistent_buffers_set
    }


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that a checkpoint holds, by full name: the biases that balance experts, and others
    that no gradient reaches."""
    computed = non_persistent_buffers(module)
    return {name: buffer for name, buffer in module.named_buffers() if name not in computed}


def compute_buffers(module: nn.Module, names: Iterable[str]) -> None:
    """Let transformers compute these non-persistent buffers, and whatever else its `_init_weights`
    sets in their owners: that of the innermost model which an owner is in, as Gemma 3n's needs."""
    for owner in {name.rpartition(".")[0] for name in names}:
        path = [module]
        for name in owner.split(".") if owner else []:
            path.append(path[-1].get_submodule(name))
        model: Any = next(part for part in reversed(path) if hasattr(part, "_init_weights"))
        model._init_weights(path[-1])


def set_parameter(module: nn.Module, names: Sequence[str], parameter: nn.Parameter) -> None:
    """Put one parameter under all of its names."""
    for name in names:
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, parameter)


def layer_of(name: str) -> str:
    """Prefix up to the first number: "model.layers.3."; the name itself outside of layers."""
    match = _LAYER.match(name)
    return match[0] if match else name
