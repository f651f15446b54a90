"""The memory of an engine in this process: weights and KV cache given back, and taken again.

Owns two ways. Storages are made empty and full again, which keeps every tensor and view of them but
not their addresses: on a CPU, and on CUDA without graphs. SGLang's memory saver keeps addresses,
which captured graphs have in them. Must not know when memory is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

WEIGHTS, KV_CACHE = "weights", "kv_cache"


def use_memory_saver_in_process() -> None:
    """SGLang's memory saver through torch's allocator: it has no library preloaded here.

    Before SGLang uses it first. Its regions are memory pools with an allocator of their own.
    """
    import torch_memory_saver

    saver = torch_memory_saver.torch_memory_saver
    if saver._impl is None:
        saver.hook_mode = "torch"


class Storages:
    """Gives memory back by making storages empty."""

    def __init__(self, model: torch.nn.Module, pool: Any) -> None:
        """pool: SGLang's KV cache."""
        self._model, self._pool = model, pool
        self._sizes: dict[str, list[tuple[torch.UntypedStorage, int]]] = {}

    def release(self, tags: Sequence[str]) -> None:
        """What was held is lost, but the model's buffers."""
        on_cuda = next(self._model.parameters()).is_cuda
        if on_cuda:
            torch.cuda.synchronize()  # SGLang's streams are not the one that memory is freed on
        for tag in tags:
            assert tag not in self._sizes, f"{tag} released twice"
            sizes = self._sizes[tag] = []
            for storage in _storages(self._tensors(tag)):
                sizes.append((storage, storage.nbytes()))
                storage.resize_(0)
        if on_cuda:
            torch.cuda.empty_cache()

    def resume(self, tags: Sequence[str]) -> None:
        """Memory with garbage in it."""
        for tag in tags:
            for storage, num_bytes in self._sizes.pop(tag):
                storage.resize_(num_bytes)
            if tag == KV_CACHE and hasattr(self._pool, "_init_data_ptrs_and_strides"):
                self._pool._init_data_ptrs_and_strides()

    def held_bytes(self) -> int:
        """Of weights and KV cache."""
        tensors = [tensor for tag in (WEIGHTS, KV_CACHE) for tensor in self._tensors(tag)]
        return sum(storage.nbytes() for storage in _storages(tensors))

    def _tensors(self, tag: str) -> list[Tensor]:
        if tag == WEIGHTS:
            return list(self._model.parameters())
        assert tag == KV_CACHE, tag
        return list(_caches(self._pool))


class MemorySaver:
    """Gives memory back by SGLang's memory saver."""

    def __init__(self, updater: Any) -> None:
        """updater: the scheduler's, which does both."""
        self._updater = updater

    def release(self, tags: Sequence[str]) -> None:
        """What was held is lost, but the model's buffers."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        request = ReleaseMemoryOccupationReqInput(tags=list(tags))
        self._updater.release_memory_occupation(request)

    def resume(self, tags: Sequence[str]) -> None:
        """Memory with garbage in it, at the addresses from before."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        request = ResumeMemoryOccupationReqInput(tags=list(tags))
        self._updater.resume_memory_occupation(request)


def _storages(tensors: Sequence[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Each once: fused and tied tensors share one."""
    seen = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def _caches(pool: Any) -> Iterator[Tensor]:
    """The tensors [slot, ...] of a pool of SGLang, and of the pools inside it; tables are smaller
    and stay."""
    from sglang.srt.mem_cache.memory_pool import KVCache

    for value in vars(pool).values():
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, KVCache):
                yield from _caches(item)
            elif isinstance(item, Tensor) and item.ndim >= 3:
                yield item
