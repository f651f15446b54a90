"""Adam's moments in 8 bits: a logarithm of each number, in units of the largest of its block.

Owns the code. Must not know optimizers. As in 8-bit Adam (arXiv 2110.02861) every 256 numbers have
a scale of their own, here of one row, so that codes and scales are sharded like their parameter
and a checkpoint holds them as they are. Unlike there,

- levels are evenly spaced logarithms, 12 % apart for v and 10 % for m, over 42 and 18 octaves;
- a number is rounded up as often as it is nearer to the upper level (narrow.py says why),
  with a threshold that is another one for each place of a block;
- no v is rounded to zero in a block that is not: m / (sqrt(v) + eps) would run away.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
"""numbers of a row that share a scale"""
GOLDEN_RATIO = 0.6180339887498949
PLASTIC_RATIO = 0.7548776662466927  # of places: a second dimension without resonance
_LEVELS = {True: 127, False: 255}
_PER_OCTAVE = {True: 7, False: 6}
_SIGN = 128


def scales_shape(shape: torch.Size) -> torch.Size:
    """Of the scales of a tensor [..., C]: [..., ceil(C / BLOCK)]. A shorter row is one block."""
    return torch.Size((*shape[:-1], -(-shape[-1] // BLOCK)))


def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """float32 numbers [..., C] of uint8 codes [..., C] and their scales."""
    levels, per_octave = _LEVELS[signed], _PER_OCTAVE[signed]
    magnitude = (codes & (_SIGN - 1) if signed else codes).float()
    found = magnitude.sub(levels).div_(per_octave).exp2_().masked_fill_(magnitude == 0, 0.0)
    del magnitude  # of large tensors, like all that is done in place here
    if signed:
        found.mul_(torch.where(codes >= _SIGN, -1.0, 1.0))
    found = _blocks(found).mul_(scales[..., None])
    return found.flatten(-2)[..., : codes.shape[-1]].contiguous()  # as fused kernels want it


def encode(numbers: Tensor, step: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """(codes, scales) of float32 numbers [..., C], which are not negative unless `signed`.

    step: one number, by which the thresholds of rounding move.
    """
    levels, per_octave = _LEVELS[signed], _PER_OCTAVE[signed]
    blocks = _blocks(numbers)  # [..., C / BLOCK, BLOCK]
    scales = blocks.abs().amax(-1)
    shares = blocks.abs().div_(torch.where(scales == 0, 1.0, scales)[..., None])
    lower = shares.log2().mul_(per_octave).add_(levels).floor_().clamp_(0, levels)
    low = lower.sub(levels).div_(per_octave).exp2_().masked_fill_(lower == 0, 0.0)
    shares.sub_(low)
    high = lower.add(1 - levels).div_(per_octave).exp2_()
    shares.div_(high.sub_(low))
    del low, high
    lower.add_(shares >= 1 - _thresholds(step, blocks)).clamp_(0 if signed else 1, levels)
    codes = lower.masked_fill_(scales[..., None] == 0, 0.0).to(torch.uint8)
    if signed:
        codes |= (blocks < 0).to(torch.uint8) * _SIGN
    return codes.flatten(-2)[..., : numbers.shape[-1]], scales


def _thresholds(step: Tensor, blocks: Tensor) -> Tensor:
    """In (0, 1], of each place of a block."""
    places = torch.arange(blocks.shape[-1], dtype=torch.float64, device=blocks.device)
    moved = step.to(blocks.device).double() * GOLDEN_RATIO
    return 1 - (places * PLASTIC_RATIO + moved).frac().float()


def _blocks(x: Tensor) -> Tensor:
    """[..., C] as [..., C / BLOCK, BLOCK], with zeros where the last block is not full."""
    width = min(BLOCK, x.shape[-1])
    missing = -x.shape[-1] % width
    return (F.pad(x, (0, missing)) if missing else x).unflatten(-1, (-1, width))
