"""AdamW whose two moments are kept in another dtype than the parameters, computed in float32.

Owns how a moment is rounded. Must not know models; sharded parameters (DTensor) are updated shard
by shard, as every element is on its own.

bfloat16 has 8 bits, so an average with beta2 = 0.999 would stand still in it: one step moves v by
at most 0.1 % of itself where the gradient vanishes, and to the nearest is half of 0.8 or 0.4 %. So
moments are rounded up or down at a threshold that runs through all of [0, 1) from step to step, by
multiples of the golden ratio (Weyl's equidistribution): what is lost at one step is made up for
within a few, as in stochastic rounding, but with less noise, and the same on any number of ranks,
in any sharding and after a resume, because it is a function of the step.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

GOLDEN_RATIO = 0.6180339887498949
ELEMENTS_AT_ONCE = 2**26
"""of the float32 copies that a step makes, of each of the two moments"""


class _Part(NamedTuple):
    """Elements of one parameter on this rank, flat where they are a part of it."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor


class NarrowAdamW(torch.optim.AdamW):
    """torch's AdamW, its kernels and state, with the moments in `state_dtype`.

    In float32 it computes what torch's does. bfloat16 is rounded as this module says; parameters
    that are not float32 are rounded to the nearest.
    """

    def __init__(self, parameters: Iterable[Any], *, state_dtype: torch.dtype, **options: Any):
        """parameters, options: torch.optim.AdamW's, without amsgrad, maximize, differentiable."""
        super().__init__(parameters, **options)
        self.state_dtype = state_dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step, of the parameters that have a gradient."""
        assert closure is None, "the gradients are there already"
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            for parameter in held:
                self._begin(parameter, on_device=bool(group["fused"]))
            for parts in _at_once(part for p in held for part in self._parts(p)):
                _update(parts, group)
            for parameter in held:
                self.state[parameter]["step"] += 1

    def _begin(self, parameter: Tensor, *, on_device: bool) -> None:
        state = self.state[parameter]
        if not state:
            device = parameter.device if on_device else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=self.state_dtype)

    def _parts(self, parameter: Tensor) -> Iterator[_Part]:
        """A parameter, in pieces where it is large, each with a step of its own."""
        state = self.state[parameter]
        assert parameter.grad is not None
        whole = parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]
        tensors = [_local(tensor) for tensor in whole]
        if tensors[0].numel() > ELEMENTS_AT_ONCE and all(t.is_contiguous() for t in tensors):
            pieces = zip(*(t.view(-1).split(ELEMENTS_AT_ONCE) for t in tensors), strict=True)
        else:
            pieces = iter([tuple(tensors)])
        for p, gradient, exp_avg, exp_avg_sq in pieces:
            if p.numel():  # a rank may have nothing of a small parameter
                yield _Part(p, gradient, exp_avg, exp_avg_sq, state["step"].clone())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _at_once(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Parts that are updated together: few kernels, and copies that stay small."""
    found, size = [], 0
    for part in parts:
        if found and size + part.parameter.numel() > ELEMENTS_AT_ONCE:
            yield found
            found, size = [], 0
        found.append(part)
        size += part.parameter.numel()
    if found:
        yield found


def _update(parts: list[_Part], group: dict[str, Any]) -> None:
    """torch's AdamW step of the parts, in float32."""
    wide = [_Part(*(tensor.float() for tensor in part)) for part in parts]
    parameters, gradients, exp_avgs, exp_avg_sqs, steps = map(list, zip(*wide, strict=True))
    adamw(
        parameters,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        foreach=group["foreach"],
        fused=group["fused"],
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for part, new in zip(parts, wide, strict=True):
        for name in ("parameter", "exp_avg", "exp_avg_sq"):
            old, value = getattr(part, name), getattr(new, name)
            if old is value:
                continue  # it is float32
            if name != "parameter" and old.dtype == torch.bfloat16:
                round_to_bfloat16(value, new.step)
            old.copy_(value)


def round_to_bfloat16(x: Tensor, step: Tensor) -> None:
    """Round finite float32 numbers, in place, to such that bfloat16 holds exactly.

    The magnitude is rounded up where the bits that bfloat16 lacks, as a share of its last place,
    are at least 1 minus the threshold of the step, else down.

    Args:
        step: one number; where the optimizer's step is on the device, nothing waits for it.
    """
    threshold = (step.double() * GOLDEN_RATIO).frac().mul(2**16).to(torch.int32)
    x.view(torch.int32).add_(threshold).bitwise_and_(-(2**16))
