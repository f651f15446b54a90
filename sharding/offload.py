"""Parameters and optimizer state between the device and pinned host memory.

Owns where the tensors of a module or an optimizer rest between their uses. Tensor objects stay the
same, so that FSDP2, optimizers and checkpoints keep their references: while a tensor is offloaded
its data are in host memory (readable and writable there), and its device memory is free. Tensors
that live on the host anyway (device cpu, FSDP2's CPUOffloadPolicy) are left alone. Must not know
when anything is needed.

A tensor keeps its host memory while it is on the device: what was not changed there goes to rest
without a copy, and a checkpoint that is being written may read it until the next update (`lend`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from sharding.adapters import adapters_of
from sharding.fsdp import reshard
from sharding.host_memory import HostBlocks


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
    """Where the tensors of one owner are, and its host memory, which each of them keeps."""

    def __init__(self, *, rests: bool = False) -> None:
        self.rests = rests
        self.parked: list[_Parked] = []
        self.readers: list[Future[Any]] = []
        """of host memory; it is not written to before they are done"""
        self._hosts = WeakTensorKeyDictionary()
        self._blocks = HostBlocks()

    def park(self, tensors: Sequence[Tensor], *, changed: bool = True) -> None:
        """Copy to the host, free the device storages. Returns when both are done.

        changed: false where nothing was written to since `restore`: only new tensors are copied.
        """
        self.rests = True
        if changed:
            wait(self.readers)  # errors are for whoever started them
            self.readers.clear()
        new = self._take_memory([tensor for tensor in tensors if tensor not in self._hosts])
        moved = [
            _Parked(tensor, tensor.data, _num_bytes(tensor), self._hosts[tensor])
            for tensor in tensors
        ]
        for p in moved:
            if changed or id(p.tensor) in new:
                p.host.copy_(_bytes(p.tensor, p.num_bytes), non_blocking=True)
        if any(p.on_device.is_cuda for p in moved):
            torch.cuda.current_stream(moved[0].on_device.device).synchronize()
        for p in moved:
            p.tensor.data = _typed(p.host, p.on_device)
            p.on_device.untyped_storage().resize_(0)
        self.parked += moved

    def park_new(self, tensors: Iterable[Tensor]) -> None:
        """Free the device storage of each tensor as it comes; on the host it is zero."""
        hollow, sizes = [], []
        for tensor in tensors:
            hollow.append(tensor)
            sizes.append(_num_bytes(tensor))
            tensor.untyped_storage().resize_(0)
        self._take_memory(hollow, sizes)
        for tensor, num_bytes in zip(hollow, sizes, strict=True):
            host, on_device = self._hosts[tensor].zero_(), tensor.data
            tensor.data = _typed(host, on_device)
            self.parked.append(_Parked(tensor, on_device, num_bytes, host))

    def restore(self) -> None:
        """Allocate the device storages again and copy back, in the order of the current stream."""
        self.rests = False
        for p in self.parked:
            p.on_device.untyped_storage().resize_(p.num_bytes)
            _bytes(p.on_device, p.num_bytes).copy_(p.host, non_blocking=True)
            p.tensor.data = p.on_device
        self.parked.clear()

    def _take_memory(self, tensors: Sequence[Tensor], sizes: Sequence[int] = ()) -> set[int]:
        """Host memory for tensors that have none (`sizes`: where they are hollow); their ids."""
        sizes = sizes or [_num_bytes(tensor) for tensor in tensors]
        pinned = any(tensor.is_cuda for tensor in tensors)
        for tensor, host in zip(tensors, self._blocks.take(sizes, pinned=pinned), strict=True):
            self._hosts[tensor] = host
        return {id(tensor) for tensor in tensors}


# By owner, and gone with it. It is here and not in the hands of callers because whoever meets the
# module or the optimizer (a learner, a checkpoint, the reshard) has to agree on where its tensors
# are. Only this file reads it; offloading twice, and reloading what is here, do nothing.
_PLACES: WeakKeyDictionary[nn.Module | Optimizer, _Place] = WeakKeyDictionary()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device, through pinned memory and without waiting on CUDA."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def offload_module(module: nn.Module, *, changed: bool = True) -> None:
    """Parameters of an FSDP2 (or plain) module to the host; gradients are gone before it rests.

    Gathered FSDP2 units are freed first: only this rank's shards move. The frozen base under
    adapters is copied once.

    changed: false = nothing has written to parameters since `reload_module`, so that the host has
    their values already.
    """
    reshard(module)
    adapters = adapters_of(module)
    base = adapters.base if adapters is not None else frozenset[str]()
    _park(module, _module_tensors(module, lambda name: name in base), changed=False)
    _park(module, _module_tensors(module, lambda name: name not in base), changed=changed)


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
            if is_on_device(local := own_data(tensor)):
                yield local

    place.park_new(of_the_device())
    return made


def home_device(module: nn.Module, parameter: Tensor) -> torch.device:
    """The device that a parameter of the module computes on, wherever it rests now."""
    local = own_data(parameter)
    parked = _PLACES[module].parked if module in _PLACES else []
    return next((p.on_device.device for p in parked if p.tensor is local), local.device)


def host_storages(owner: nn.Module | Optimizer) -> set[int]:
    """Addresses of the host storages that what is offloaded lies in."""
    parked = _PLACES[owner].parked if owner in _PLACES else []
    return {p.host.untyped_storage().data_ptr() for p in parked}


def lend(owner: nn.Module | Optimizer, until: Future[Any]) -> None:
    """Keep what is offloaded as it is on the host until that is done, for whoever reads it there.

    It may be reloaded, changed and freed on the device; `offload_*` waits before it copies back.
    """
    if owner in _PLACES:
        place = _PLACES[owner]
        place.readers = [reader for reader in place.readers if not reader.done()] + [until]


def settle(owner: nn.Module | Optimizer) -> None:
    """Wait until nobody reads what is offloaded, so that it may be changed on the host."""
    if owner in _PLACES:
        place = _PLACES[owner]
        wait(place.readers)  # errors are for whoever started them
        place.readers.clear()


def forget_state(optimizer: Optimizer) -> None:
    """Drop the state of an optimizer, wherever it is, and its host memory; new state will be where
    that was."""
    optimizer.state.clear()
    if optimizer in _PLACES:
        _PLACES[optimizer] = _Place(rests=_PLACES[optimizer].rests)


def _park(owner: nn.Module | Optimizer, tensors: Iterator[Tensor], *, changed: bool = True) -> None:
    place = _PLACES.setdefault(owner, _Place())
    place.park([tensor for tensor in tensors if is_on_device(tensor)], changed=changed)


def _restore(owner: nn.Module | Optimizer, device: torch.device) -> None:
    place = _PLACES.get(owner)
    if place is not None:
        away = {p.on_device.device for p in place.parked} - {device}
        assert not away, f"{type(owner).__name__}: from {away}, not {device}"
        place.restore()


def is_on_device(tensor: Tensor) -> bool:
    """Whether the tensor takes memory of a device, so that it can rest on the host."""
    return tensor.is_cuda


def _module_tensors(
    module: nn.Module, which: Callable[[str], bool] = lambda name: True
) -> Iterator[Tensor]:
    return (own_data(parameter) for name, parameter in module.named_parameters() if which(name))


def _optimizer_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (own_data(value) for value in state.values() if isinstance(value, Tensor))


def own_data(tensor: Tensor) -> Tensor:
    """The tensor that owns the data of this rank; to_local() would be another object that shares
    them."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _num_bytes(tensor: Tensor) -> int:
    """Of the tensor's storage, padding included."""
    return tensor.untyped_storage().nbytes()


def _bytes(tensor: Tensor, num_bytes: int) -> Tensor:
    """All bytes of the tensor's storage, padding included: [num_bytes] uint8."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage(), 0, (num_bytes,), (1,))  # pyright: ignore


def _typed(host: Tensor, like: Tensor) -> Tensor:
    """The host bytes seen as `like` sees its storage."""
    typed = torch.empty(0, dtype=like.dtype)
    offset = host.storage_offset() // like.element_size() + like.storage_offset()
    return typed.set_(host.untyped_storage(), offset, like.shape, like.stride())  # pyright: ignore
