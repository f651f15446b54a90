"""Weights for an engine in another process of this node: handles instead of data.

Owns how a payload is shared (CUDA IPC; shared memory on a CPU) and how an answer comes back. Must
not know what a payload contains.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from sharding.mesh import Mesh


def answer_in(result: Tensor) -> dict[str, Any] | None:
    """What the worker has written; None where it was given a copy, or nothing at all."""
    written = bytes(result.tolist()).rstrip(b"\0")
    return json.loads(written) if written else None


def serialize(named_tensors: list[tuple[str, Tensor]]) -> bytes:
    """Pickle with handles instead of data, for another process of this node.

    The stream is waited for first: a reader in another process cannot wait for it. CPU handles are
    file names, because file descriptors travel only between a process and its own child.
    """
    if named_tensors[0][1].is_cuda:
        torch.cuda.current_stream().synchronize()
    with sharing_strategy("file_system"), io.BytesIO() as buffer:
        ForkingPickler(buffer).dump(named_tensors)
        return buffer.getvalue()


@contextmanager
def shareable_memory(device: torch.device) -> Iterator[None]:
    """No expandable segments meanwhile: another process may not be able to open them."""
    settings = torch._C._accelerator_getAllocatorSettings()
    options = [option for option in settings.split(",") if option]
    kept = [option for option in options if not option.startswith("expandable_segments")]
    if device.type != "cuda" or kept == options:
        yield
        return
    torch._C._accelerator_setAllocatorSettings(",".join([*kept, "expandable_segments:False"]))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


@contextmanager
def sharing_strategy(name: str) -> Iterator[None]:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(name)
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def fit_shared_memory(bucket_mib: float, mesh: Mesh) -> float:
    """On a CPU the buckets of a node's ranks lie in /dev/shm, which containers keep small."""
    if mesh.device.type != "cpu":
        return bucket_mib
    share = shutil.disk_usage("/dev/shm").free / mesh.dims.ranks_per_node / 2 / 1024**2
    fitting = torch.tensor(min(bucket_mib, share), dtype=torch.float64)
    dist.all_reduce(fitting, dist.ReduceOp.MIN, group=mesh.host_group)
    return fitting.item()
