"""liger's kernels in a transformers model: RMSNorm, SwiGLU, rotary positions.

Owns what of the package (liger_kernel) is used, and what of its changes is undone. Must not know
what a model is used for.
"""

import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ppo.errors import InputError

logger = logging.getLogger(__name__)

LIGER = {"rope": True, "rms_norm": True, "swiglu": True}
NOT_LIGER = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""log-probs are computed in blocks of our own"""


def use_liger(module: nn.Module, device: torch.device) -> None:
    """Give a transformers model, on meta too, liger's RMSNorm, SwiGLU and rotary positions.

    The package changes classes and functions of the family's file besides: of these only rotary
    positions stay, for tensors of a device; other models are built and run as before.

    Raises InputError where the package is not installed, or the device is a CPU.
    """
    if device.type != "cuda":
        raise InputError("model.use_liger: its kernels need CUDA: leave it out on a CPU")
    try:
        from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
            _apply_liger_kernel_to_instance,
        )
    except ImportError as error:
        raise InputError(
            f"model.use_liger: the package liger-kernel cannot be imported ({error}): "
            "pip install liger-kernel, or leave it out"
        ) from error
    home = sys.modules[type(module).__module__]
    before = dict(vars(home))
    _apply_liger_kernel_to_instance(model=module, **LIGER, **NOT_LIGER)
    changed = {name: new for name, new in vars(home).items() if before.get(name) is not new}
    for name in changed:
        setattr(home, name, before[name])
    rotate = changed.get("apply_rotary_pos_emb")
    if rotate is not None:
        plain = before["apply_rotary_pos_emb"]
        plain = plain.args[1] if isinstance(plain, partial) else plain  # of a model before
        home.apply_rotary_pos_emb = partial(_rotated, rotate, plain)  # pyright: ignore
    logger.info("%s: liger's kernels: %s", type(module).__name__, ", ".join(LIGER))


def _rotated(
    rotate: Callable[..., Any], plain: Callable[..., Any], query: Tensor, *args: Any, **more: Any
) -> Any:
    """Rotary positions by liger on a device, by transformers elsewhere."""
    return (rotate if query.is_cuda else plain)(query, *args, **more)
