"""Layers whose forward torch compiles.

Owns how a layer's forward is wrapped for it, and what happens where that cannot be done. Must not
know FSDP or what a layer computes.

Order: `compile_layers`, then sharding/activations.py, then `shard_model`: what is compiled is the
layer's arithmetic alone, so that hooks, recomputation and offload stay as they are.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from sharding.fsdp import transformer_layers

logger = logging.getLogger(__name__)


def compile_layers(module: nn.Module, *, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile the forward of every layer when it is first called, with sizes left open.

    Layers of one kind share what is compiled: their parameters are arguments of it. A pass without
    gradients is compiled besides. Where compiling fails, all layers run as they are from then on,
    and one warning says why.
    """
    failed: list[str] = []
    for layer in transformer_layers(module):
        plain = layer.forward
        compiled = torch.compile(plain, dynamic=True, backend=backend)
        layer.forward = partial(_compiled_or_plain, compiled, plain, failed)


def _compiled_or_plain(
    compiled: Callable[..., Any],
    plain: Callable[..., Any],
    failed: list[str],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """failed: of the whole module; why, once it could not be compiled."""
    if not failed:
        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            failed.append(str(error))
            reason = " ".join(failed[0].partition("\n\n")[0].split())
            logger.warning("layers run as they are, compiling them failed: %s", reason)
            logger.debug("compiling failed", exc_info=error)
    return plain(*args, **kwargs)
