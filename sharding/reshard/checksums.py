"""Checksums of an engine's weights, without a copy of them.

Owns a checksum that can be summed up piece by piece in any order, so that the sender knows it from
the buckets of the reshard and the engine from its whole parameters. Must not know engines.

checksum(x) = sum over i of bits(x_i) * ((i * K) | 1) modulo 2^64, i the index in the parameter.
The factors are odd, so a change of any one element changes the sum; zeros add nothing.
"""

from collections.abc import Mapping
from itertools import product

import torch
from torch import Tensor

from sharding.layout import Layout, view_2d
from sharding.reshard.resharder import Bucket

_K = 0x1E3779B97F4A7C15  # an odd number without structure, positive as int64
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CUT = 1 << 20
"""elements looked at once, up to 32 MiB of temporary memory: of a wide row, as one expert is in the
tensor of all, a part"""


class Checksums:
    """What the parameters of this rank's engine must sum up to, gathered from the buckets."""

    def __init__(self, layout: Layout):
        self._layout = layout
        self._sums: dict[str, Tensor] = {}

    def add(self, bucket: Bucket) -> None:
        """Take in one bucket; no host synchronisation."""
        for entry, block in bucket.views():
            width = self._layout.targets[entry.target][1]
            part = checksum(block, row=entry.dst_row, col=entry.dst_col, width=width)
            known = self._sums.get(entry.target)
            self._sums[entry.target] = part if known is None else known + part

    def expected(self) -> dict[str, int]:
        """Checksum by target."""
        nothing = dict.fromkeys(self._layout.targets, 0)  # padding only
        if not self._sums:
            return nothing
        values = torch.stack(list(self._sums.values())).tolist()
        return nothing | dict(zip(self._sums, values, strict=True))

    def differing(self, parameters: Mapping[str, Tensor]) -> list[str]:
        """Targets whose parameter is missing, or is not what was sent."""
        return [
            name
            for name, value in self.expected().items()
            if name not in parameters or checksum(parameters[name]).item() != value
        ]


def checksum(tensor: Tensor, *, row: int = 0, col: int = 0, width: int | None = None) -> Tensor:
    """Checksum (int64 scalar) of a block whose first element is [row, col] of a parameter.

    ``tensor`` is seen as its 2-D view; ``width`` is the number of columns of the parameter's 2-D
    view, by default the tensor's own.
    """
    rows, cols = view_2d(tensor.shape)
    block = tensor.detach().reshape(rows, cols).view(_BITS[tensor.element_size()])
    width = cols if width is None else width
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    step = max(1, _CUT // max(cols, 1))
    for start, left in product(range(0, rows, step), range(0, cols, _CUT)):
        part = block[start : start + step, left : left + _CUT].to(torch.int64)
        top, first = row + start, col + left
        lines = torch.arange(top, top + part.shape[0], device=tensor.device)
        columns = torch.arange(first, first + part.shape[1], device=tensor.device)
        factors = (lines[:, None] * width + columns).mul_(_K).bitwise_or_(1)
        total += part.mul_(factors).sum()
    return total
