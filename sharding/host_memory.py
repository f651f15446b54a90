"""Host memory for what leaves a device, cut from large blocks.

Owns that pinned memory is not wasted: torch takes a power of two for every request, up to twice
what was asked for, and keeps it. Must not know what lies in it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK_BYTES = 1 << 30
_ALIGNMENT = 512


class HostBlocks:
    """Memory that is taken in pieces, and kept until the owner is gone."""

    def __init__(self) -> None:
        self._blocks: dict[bool, list[tuple[Tensor, int]]] = {True: [], False: []}

    def take(self, sizes: Sequence[int], *, pinned: bool) -> list[Tensor]:
        """One piece for each size in bytes, [size] uint8, whole in one block."""
        left, pieces = sum(sizes), []
        for size in sizes:
            pieces.append(self._piece(size, left, self._blocks[pinned], pinned))
            left -= size
        return pieces

    def _piece(
        self, size: int, left: int, blocks: list[tuple[Tensor, int]], pinned: bool
    ) -> Tensor:
        """Of the first block with room, else of a new one, which the `left` bytes will fill."""
        for index, (block, used) in enumerate(blocks):
            start = -(-used // _ALIGNMENT) * _ALIGNMENT
            if start + size <= len(block):
                blocks[index] = block, start + size
                return block[start : start + size]
        filled = 1 << max(min(BLOCK_BYTES, left).bit_length() - 1, 0)
        needed = 1 << max(size - 1, 0).bit_length()
        block = torch.empty(max(filled, needed), dtype=torch.uint8, pin_memory=pinned)
        blocks.append((block, size))
        return block[:size]
