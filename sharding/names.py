"""Names of a module's parameters: tied ones, and those of a layer.

Owns the rules of what is tied (the same object under several names) and what belongs together. Must
not know checkpoints or engines.
"""

import re
from collections.abc import Sequence

from torch import nn

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


def set_parameter(module: nn.Module, names: Sequence[str], parameter: nn.Parameter) -> None:
    """Put one parameter under all of its names."""
    for name in names:
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, parameter)


def layer_of(name: str) -> str:
    """Prefix up to the first number: "model.layers.3."; the name itself outside of layers."""
    match = _LAYER.match(name)
    return match[0] if match else name
