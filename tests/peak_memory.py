"""How many bytes of tensors are alive at most.

Owns one measure for both kinds of device: on CUDA the caching allocator's peak, on the CPU the peak
of live tensor storages, each counted once. Must not know what the memory is used for.
"""

import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class PeakTracker:
    """Context manager: ``peak_bytes`` alive at once on a device since it began.

    On the CPU these are the storages that operations make inside the block, and those of tensors
    given to ``watch``; memory inside of kernels, of gloo and of other processes is not seen, and
    every operation is slower by some microseconds. On CUDA it is all that the allocator had given
    out. Trackers may be nested: an inner one does not disturb the peak of an outer one. Nor does
    whoever else begins a new peak meanwhile, as ppo/metrics.py does for each of its phases; around
    a tracker, it would miss what was before.
    """

    _active: ClassVar["list[PeakTracker]"] = []

    def __init__(self, device: torch.device):
        self._device = device
        self._storages = None if device.type == "cuda" else _LiveStorages()
        self._peak = 0
        self._start = 0

    def __enter__(self) -> "PeakTracker":
        if self._storages is not None:
            self._storages.__enter__()
        else:
            self._fold_peak()
            self._reset = torch.cuda.reset_peak_memory_stats
            torch.cuda.reset_peak_memory_stats = self._reset_by_others
            self._active.append(self)
            self._start = self._peak = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._storages is not None:
            self._storages.__exit__(kind, error, trace)
        else:
            self._fold_peak()
            self._active.remove(self)
            torch.cuda.reset_peak_memory_stats = self._reset

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that are older than the tracker (no effect on CUDA: all are counted)."""
        if self._storages is None:
            return
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._storages.see(local.untyped_storage())

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once; may be read inside the block."""
        if self._storages is not None:
            return self._storages.peak
        if self in self._active:
            self._fold_peak()
        return self._peak

    @property
    def extra_bytes(self) -> int:
        """Most bytes alive at once beyond those of the block's begin."""
        return self.peak_bytes - self._start

    def _fold_peak(self) -> None:
        """Give the allocator's peak to all active trackers and begin a new one."""
        peak = torch.cuda.max_memory_allocated(self._device)
        for tracker in self._active:
            tracker._peak = max(tracker._peak, peak)
        (self._active[0]._reset if self._active else torch.cuda.reset_peak_memory_stats)(
            self._device
        )

    def _reset_by_others(self, device: Any = None) -> None:
        self._fold_peak()


class _LiveStorages(TorchDispatchMode):
    """Bytes of the storages that operations return, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._total = 0
        self.peak = 0
        self._resize: Callable[..., Any] | None = None

    def __enter__(self) -> "_LiveStorages":
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, storage.nbytes())
            return storage

        # FSDP frees and refills storages by it.
        torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[assignment]
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations on local tensors come here next
        result = func(*args, **(kwargs or {}))
        made = [s for s in _storages(result) if s._cdata not in self._sizes]
        if made:
            given = {storage._cdata for storage in _storages((args, kwargs))}
            for storage in made:
                if storage._cdata not in given:  # else a view of, or a change to, an old tensor
                    self.see(storage)
        return result

    def see(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "meta" or storage._cdata in self._sizes:
            return
        self._set(storage._cdata, storage.nbytes())
        weakref.finalize(storage, self._set, storage._cdata, None).atexit = False

    def _set(self, key: int, size: int | None) -> None:
        """Replace the size of a storage; None = it is gone."""
        self._total -= self._sizes.pop(key, 0)
        if size is not None:
            self._sizes[key] = size
            self._total += size
            self.peak = max(self.peak, self._total)


def _storages(values: Any) -> list[torch.UntypedStorage]:
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return [leaf.untyped_storage() for leaf in leaves if not is_traceable_wrapper_subclass(leaf)]
