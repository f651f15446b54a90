"""Parameters, gradients and optimizer state between the device and pinned host memory.

Owns where the tensors of a module or an optimizer rest between their uses. Tensor objects stay the
same, so that FSDP2, optimizers and checkpoints keep their references: while a tensor is offloaded
its data are in host memory (readable and writable there), and its device memory is free. Tensors
that live on the host anyway (device cpu, FSDP2's CPUOffloadPolicy) are left alone. Must not know
when anything is needed.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sharding.fsdp import reshard

BLOCK_BYTES = 1 << 30
"""Pinned memory is taken in blocks, since torch rounds every request up to a power of two."""
_ALIGNMENT = 512


class _Parked(NamedTuple):
    """One tensor that is offloaded.

    `on_device` is an alias of its device storage, which is emptied. FSDP2 keeps aliases of its own
    (the padded shard that it gathers from), so the storage must be the same one afterwards.
    """

    tensor: Tensor
    on_device: Tensor
    num_bytes: int
    host: Tensor  # [num_bytes] uint8, pinned


class _Place:
    """Where the tensors of one owner are, and its host memory, which is kept for the next time."""

    def __init__(self) -> None:
        self.rests = False
        self.parked: list[_Parked] = []
        self._spare: dict[int, list[Tensor]] = {}
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0  # bytes of the block

    def park(self, tensors: Sequence[Tensor]) -> None:
        """Copy to the host, free the device storages. Returns when both are done."""
        self.rests = True
        total = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        moved = [self._copy(tensor, min(BLOCK_BYTES, total)) for tensor in tensors]
        if any(p.on_device.is_cuda for p in moved):
            torch.cuda.current_stream(moved[0].on_device.device).synchronize()
        for p in moved:
            p.tensor.data = _typed(p.host, p.on_device)
            p.on_device.untyped_storage().resize_(0)
        self.parked += moved

    def park_new(self, tensors: Iterable[Tensor]) -> None:
        """Free the device storage of each tensor as it comes; on the host it is zero."""
        hollow = []
        for tensor in tensors:
            hollow.append((tensor, tensor.data, tensor.untyped_storage().nbytes()))
            tensor.untyped_storage().resize_(0)
        block_bytes = min(BLOCK_BYTES, sum(num_bytes for _, _, num_bytes in hollow))
        for tensor, on_device, num_bytes in hollow:
            host = self._take(num_bytes, block_bytes, pinned=on_device.is_cuda).zero_()
            tensor.data = _typed(host, on_device)
            self.parked.append(_Parked(tensor, on_device, num_bytes, host))

    def restore(self) -> None:
        """Allocate the device storages again and copy back, in the order of the current stream."""
        self.rests = False
        for p in self.parked:
            p.on_device.untyped_storage().resize_(p.num_bytes)
            _bytes(p.on_device, p.num_bytes).copy_(p.host, non_blocking=True)
            p.tensor.data = p.on_device
            self._spare.setdefault(p.num_bytes, []).append(p.host)
        self.parked.clear()

    def _copy(self, tensor: Tensor, block_bytes: int) -> _Parked:
        num_bytes = tensor.untyped_storage().nbytes()
        spare = self._spare.get(num_bytes)
        host = spare.pop() if spare else self._take(num_bytes, block_bytes, pinned=tensor.is_cuda)
        host.copy_(_bytes(tensor, num_bytes), non_blocking=True)
        return _Parked(tensor, tensor.data, num_bytes, host)

    def _take(self, num_bytes: int, block_bytes: int, *, pinned: bool) -> Tensor:
        """[num_bytes] uint8 of the block, or of a new one where it is full."""
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if start + num_bytes > len(self._block):
            size, start = max(num_bytes, block_bytes), 0
            self._block = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._used = start + num_bytes
        return self._block[start : self._used]


# By owner, and gone with it. It is here and not in the hands of callers because whoever meets the
# module or the optimizer (a learner, a checkpoint, the reshard) has to agree on where its tensors
# are. Only this file reads it; offloading twice, and reloading what is here, do nothing.
_PLACES: WeakKeyDictionary[nn.Module | Optimizer, _Place] = WeakKeyDictionary()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device, through pinned memory and without waiting on CUDA."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def offload_module(module: nn.Module) -> None:
    """Parameters and gradients of an FSDP2 (or plain) module to the host.

    Gathered FSDP2 units are freed first: only this rank's shards move.
    """
    reshard(module)
    _park(module, _module_tensors(module))


def reload_module(module: nn.Module, device: torch.device) -> None:
    """Undo `offload_module`; `device` is the one that the tensors came from."""
    _restore(module, device)


def offload_optimizer(optimizer: Optimizer) -> None:
    """State of an optimizer to the host; before its first step there is none.

    State that a checkpoint brings meanwhile is made on the host, by `new_state`.
    """
    _park(optimizer, _optimizer_tensors(optimizer))


def reload_optimizer(optimizer: Optimizer, device: torch.device) -> None:
    """Undo `offload_optimizer`; `device` is the one that the tensors came from."""
    _restore(optimizer, device)


def new_state(optimizer: Optimizer, tensors: Iterable[Tensor]) -> list[Tensor]:
    """State to be filled, made on the device one by one, where the optimizer's state is now.

    While that rests on the host, the device never holds more than one of the tensors, which are
    zero then.
    """
    place, made = _PLACES.get(optimizer), []
    if place is None or not place.rests:
        return list(tensors)

    def of_the_device() -> Iterator[Tensor]:
        for tensor in tensors:
            made.append(tensor)
            if _is_on_device(local := _local(tensor)):
                yield local

    place.park_new(of_the_device())
    return made


def home_device(module: nn.Module, parameter: Tensor) -> torch.device:
    """The device that a parameter of the module computes on, wherever it rests now."""
    local = _local(parameter)
    parked = _PLACES[module].parked if module in _PLACES else []
    return next((p.on_device.device for p in parked if p.tensor is local), local.device)


def _park(owner: nn.Module | Optimizer, tensors: Iterator[Tensor]) -> None:
    place = _PLACES.setdefault(owner, _Place())
    place.park([tensor for tensor in tensors if _is_on_device(tensor)])


def _restore(owner: nn.Module | Optimizer, device: torch.device) -> None:
    place = _PLACES.get(owner)
    if place is not None:
        away = {p.on_device.device for p in place.parked} - {device}
        assert not away, f"{type(owner).__name__}: from {away}, not {device}"
        place.restore()


def _is_on_device(tensor: Tensor) -> bool:
    """Whether the tensor takes memory of a device, so that it can rest on the host."""
    return tensor.is_cuda


def _module_tensors(module: nn.Module) -> Iterator[Tensor]:
    for parameter in module.parameters():
        yield _local(parameter)
        if parameter.grad is not None:
            yield _local(parameter.grad)


def _optimizer_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (_local(value) for value in state.values() if isinstance(value, Tensor))


def _local(tensor: Tensor) -> Tensor:
    """The tensor that owns the data; to_local() would be another object that shares them."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _bytes(tensor: Tensor, num_bytes: int) -> Tensor:
    """All bytes of the tensor's storage, padding included: [num_bytes] uint8."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage(), 0, (num_bytes,), (1,))  # pyright: ignore


def _typed(host: Tensor, like: Tensor) -> Tensor:
    """The host bytes seen as `like` sees its storage."""
    typed = torch.empty(0, dtype=like.dtype)
    offset = host.storage_offset() // like.element_size() + like.storage_offset()
    return typed.set_(host.untyped_storage(), offset, like.shape, like.stride())  # pyright: ignore
