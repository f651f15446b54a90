"""AdamW whose two moments are kept in another dtype than the parameters, computed in float32.

Owns how a moment is rounded to bfloat16, and where parameters are cut. Must not know models;
sharded parameters (DTensor) are updated shard by shard, as every element (in 8 bits: every row) is
on its own.

bfloat16 has 8 bits, so an average with beta2 = 0.999 would stand still in it: one step moves v by
at most 0.1 % of itself where the gradient vanishes, and to the nearest is half of 0.8 or 0.4 %. So
moments are rounded up or down at a threshold that runs through all of [0, 1) from step to step, by
multiples of the golden ratio (Weyl's equidistribution): what is lost at one step is made up for
within a few, as in stochastic rounding, but with less noise, and the same on any number of ranks,
in any sharding and after a resume, because it is a function of the step. Codes of 8 bits
(eight_bits.py) are rounded likewise.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim.adamw import adamw

from sharding.adamw.eight_bits import GOLDEN_RATIO, decode, encode, scales_shape
from sharding.offload import own_data

ELEMENTS_AT_ONCE = 2**22
"""of the float32 copies that a step makes, of each of the two moments; 16 MiB keep a GPU busy for
longer than it takes to launch the next kernel"""
EIGHT_BITS = torch.uint8
"""state_dtype of moments that are codes"""
SCALE = "_scale"
"""ends the name of the scales of a moment that is codes"""
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""whether a moment has a sign"""


class Part(NamedTuple):
    """Elements of one parameter on this rank, whole rows where they are a part of it."""

    parameter: Tensor
    gradient: Tensor
    step: Tensor
    state: dict[str, Tensor]
    """moments, and scales of those that are codes"""
    home: Tensor
    """where the parameter is; itself, unless the step is made on a copy"""


class NarrowAdamW(torch.optim.AdamW):
    """torch's AdamW, its kernels and state, with the moments in `state_dtype`.

    In float32 it computes what torch's does. bfloat16 is rounded as this module says; parameters
    that are not float32 are rounded to the nearest. In 8 bits, vectors (norms, biases) keep
    float32.
    """

    def __init__(self, parameters: Iterable[Any], *, state_dtype: torch.dtype, **options: Any):
        """parameters, options: torch.optim.AdamW's, without amsgrad, maximize, differentiable."""
        super().__init__(parameters, **options)
        self.state_dtype = state_dtype

    def state_names(self, parameter: Tensor) -> list[str]:
        """Of the states of a parameter, but for its step."""
        scales = [name + SCALE for name in _MOMENTS] if self._has_codes(parameter) else []
        return [*_MOMENTS, *scales]

    def empty_state(
        self, parameter: Tensor, name: str, device: torch.device | None = None
    ) -> Tensor:
        """Zeros for one of `state_names`, sharded like the parameter.

        device: that of its data; None = the parameter's.
        """
        if name.endswith(SCALE):
            return _scales_of(parameter, device)
        dtype = self.state_dtype
        if dtype == EIGHT_BITS and not self._has_codes(parameter):
            dtype = torch.float32
        return torch.zeros_like(parameter, dtype=dtype, device=device, requires_grad=False)

    def _has_codes(self, parameter: Tensor) -> bool:
        return self.state_dtype == EIGHT_BITS and parameter.ndim > 1

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step, of the parameters that have a gradient."""
        assert closure is None, "the gradients are there already"
        for group in self.param_groups:
            held = [p for p in group["params"] if self._gradient(p) is not None]
            for parameter in held:
                self._begin(parameter, on_device=bool(group["fused"]))
            for parts in _at_once(x for p in held for x in self._parts(p)):
                _update(parts, group)
                self._bring_home(parts)
            for parameter in held:
                self.state[parameter]["step"] += 1

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        """Of this rank's shard."""
        return None if parameter.grad is None else own_data(parameter.grad)

    def _copy(self, parameter: Tensor) -> Tensor:
        """What a step is made on: this rank's shard."""
        return own_data(parameter)

    def _bring_home(self, parts: list[Part]) -> None:
        """The parts have been updated."""

    def _moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """State of a parameter that has none."""
        names = self.state_names(parameter)
        return {name: self.empty_state(parameter, name) for name in names}

    def _begin(self, parameter: Tensor, *, on_device: bool) -> None:
        state = self.state[parameter]
        if not state:
            device = self._copy(parameter).device if on_device else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state |= self._moments(parameter)

    def _parts(self, parameter: Tensor) -> Iterator[Part]:
        """A parameter, in rows where it is large, each part with a step of its own."""
        state, gradient = self.state[parameter], self._gradient(parameter)
        assert gradient is not None
        names = [name for name in state if name != "step"]
        tensors = [self._copy(parameter), gradient, own_data(parameter)]
        tensors += [own_data(state[name]) for name in names]
        if tensors[0].numel() > ELEMENTS_AT_ONCE:
            rows = max(1, ELEMENTS_AT_ONCE * len(tensors[0]) // tensors[0].numel())
            pieces = zip(*(t.split(rows) for t in tensors), strict=True)
        else:
            pieces = iter([tuple(tensors)])
        for p, gradient, home, *states in pieces:
            if p.numel():  # a rank may have nothing of a small parameter
                held = dict(zip(names, states, strict=True))
                yield Part(p, gradient, state["step"].clone(), held, home)


def _scales_of(parameter: Tensor, device: torch.device | None) -> Tensor:
    """Zeros, one for each block of a row; rows are where the parameter's are."""
    local = own_data(parameter)
    shape = scales_shape(local.shape)
    zeros = torch.zeros(shape, dtype=torch.float32, device=device or local.device)
    if not isinstance(parameter, DTensor):
        return zeros
    spec, whole = parameter._spec, scales_shape(parameter.shape)
    strides = torch.empty(whole, device="meta").stride()
    meta = TensorMeta(whole, strides, torch.float32)
    spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return DTensor(zeros, spec, requires_grad=False)  # pyright: ignore


def _at_once(parts: Iterable[Part]) -> Iterator[list[Part]]:
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


def _update(parts: list[Part], group: dict[str, Any]) -> None:
    """torch's AdamW step of the parts, in float32."""
    wide = [_widened(part) for part in parts]
    adamw(
        [part.parameter for part in wide],
        [part.gradient for part in wide],
        [part.state["exp_avg"] for part in wide],
        [part.state["exp_avg_sq"] for part in wide],
        [],
        [part.step for part in wide],
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
        if part.parameter is not new.parameter:
            part.parameter.copy_(new.parameter)
        for name in _MOMENTS:
            _store(part, name, new.state[name], new.step)


def _widened(part: Part) -> Part:
    """The part in float32; what is that already, itself."""
    state = {
        name: decode(part.state[name], part.state[name + SCALE], signed=signed)
        if name + SCALE in part.state
        else part.state[name].float()
        for name, signed in _MOMENTS.items()
    }
    return part._replace(
        parameter=part.parameter.float(), gradient=part.gradient.float(), state=state
    )


def _store(part: Part, name: str, value: Tensor, step: Tensor) -> None:
    """Keep a new moment as the state has it."""
    old = part.state[name]
    if name + SCALE in part.state:
        codes, scales = encode(value, step, signed=_MOMENTS[name])
        old.copy_(codes)
        part.state[name + SCALE].copy_(scales)
    elif old is not value:  # else it is float32
        if old.dtype == torch.bfloat16:
            round_to_bfloat16(value, step)
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
