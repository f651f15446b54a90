"""A device on a machine that has none: whatever does not lie in offload's host memory is on it.

Owns the pretence, so that runs with offload do on a CPU what they do on a GPU, and the bytes that
they hold "on the device". Must not know what is offloaded.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sharding import offload
from sharding.host_memory import HostBlocks


@contextmanager
def fake_device() -> Iterator[None]:
    """Offload moves tensors of the CPU; tests.peak_memory.PeakTracker does not count them then."""
    host: dict[int, torch.UntypedStorage] = {}
    take, is_on_device = HostBlocks.take, offload.is_on_device

    def take_and_note(self: HostBlocks, sizes: Sequence[int], *, pinned: bool) -> list[Tensor]:
        with _disable_current_modes():  # a tracker does not see it
            pieces = take(self, sizes, pinned=pinned)
        storages = [piece.untyped_storage() for piece in pieces]
        host.update({storage._cdata: storage for storage in storages})
        return pieces

    HostBlocks.take = take_and_note
    offload.is_on_device = lambda tensor: tensor.untyped_storage()._cdata not in host
    try:
        yield
    finally:
        HostBlocks.take, offload.is_on_device = take, is_on_device
