"""AdamW on the host: the device keeps parameters, and neither gradients nor moments.

Owns how gradients get to the host and parameters back. As a layer's gradients are reduced, its
shard is copied to pinned memory beside the backward pass, and a thread adds it to what earlier
micro-batches have brought. The norm of all gradients has to be known before the first parameter may
change (clipping, guards), so the step itself follows the backward pass, in pieces: while one goes
back to the device, the cores compute the next. Must not know models.

In comparison FSDP2's CPUOffloadPolicy also keeps parameters on the host, copies them to the device
for every pass, and makes the backward pass wait for each addition.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from sharding import offload
from sharding.adamw.narrow import NarrowAdamW, Part
from sharding.host_memory import HostBlocks
from sharding.offload import own_data

PENDING_BYTES = 1 << 30
"""of gradients that wait to be added to those of earlier micro-batches; then the backward pass
waits for the thread"""


class HostAdamW(NarrowAdamW):
    """NarrowAdamW whose step, moments and gradients are in host memory.

    A parameter's gradient is taken as soon as it is there: `parameter.grad` is None ever after.
    On a CPU nothing is copied.
    """

    def __init__(self, module: nn.Module, *, state_dtype: torch.dtype, **options: Any):
        """Of all parameters that are trained. Options: as NarrowAdamW's."""
        trained = [p for p in module.parameters() if p.requires_grad]
        super().__init__(trained, state_dtype=state_dtype, **options)
        offload.offload_optimizer(self)  # so that state is made where it stays
        self._order = trained
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gradients")
        self._pending: deque[tuple[Future[None], int]] = deque()
        """with the bytes of host memory that each holds"""
        self._pending_bytes = 0
        self._arrived: dict[Tensor, Tensor] = {}
        """gradients, complete when nothing is pending"""
        self._blocks, self._buffers = HostBlocks(), dict[Tensor, tuple[Tensor, Tensor]]()
        """of what is on a device: its parameter and its gradient on the host"""
        self._stream: torch.cuda.Stream | None = None
        self._take_memory()
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._take)

    def fetch(self) -> None:
        """Copy the parameters to the host: once before updates, as others may have changed them."""
        for parameter, (copy, _) in self._buffers.items():
            copy.copy_(own_data(parameter).detach(), non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream().synchronize()

    def gradients(self) -> list[Tensor]:
        """All of them, of this rank's shards, on the host. Waits until they are there."""
        self._await_pending(0)
        return [self._arrived[p] for p in self._order if p in self._arrived]

    def scale(self, most: float, norm: Tensor) -> None:
        """Clip the gradients to a norm of `most`; `norm` is theirs, [] on any device."""
        factor = torch.clamp(most / (norm + 1e-6), max=1.0).cpu()
        if factor < 1 or not torch.isfinite(factor):
            for gradient in self.gradients():
                gradient.mul_(factor)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step, of the parameters that have a gradient, which are dropped."""
        self.gradients()
        offload.settle(self)
        super().step(closure)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._arrived.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self.gradients()
        self._arrived.clear()
        super().zero_grad(set_to_none)

    def _take_memory(self) -> None:
        """Host memory for the parameters and gradients of a device."""
        on_device = [p for p in self._order if offload.is_on_device(own_data(p))]
        cuda = [p for p in on_device if p.is_cuda]
        if cuda:
            self._stream = torch.cuda.Stream(cuda[0].device)
        sizes = [own_data(p).numel() * p.element_size() for p in on_device]
        pairs = [size for size in sizes for _ in range(2)]
        pieces = iter(self._blocks.take(pairs, pinned=bool(cuda)))
        for parameter in on_device:
            like = own_data(parameter)
            copy, gradient = (next(pieces).view(like.dtype).view(like.shape) for _ in range(2))
            self._buffers[parameter] = copy, gradient

    def _take(self, parameter: Tensor) -> None:
        """A gradient is there: send it to the host. Runs inside of the backward pass."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        sent, copied, is_first = own_data(gradient).detach(), None, parameter not in self._arrived
        if parameter in self._buffers:
            buffer, pinned = self._buffers[parameter][1], self._stream is not None
            host = buffer if is_first else torch.empty_like(buffer, pin_memory=pinned)
            sent, copied = host, self._copied(sent, host)
        target = self._arrived.setdefault(parameter, sent)
        size = 0 if sent is target else sent.numel() * sent.element_size()
        self._pending.append((self._thread.submit(_arrive, copied, sent, target), size))
        self._pending_bytes += size
        self._await_pending(PENDING_BYTES)

    def _await_pending(self, most: int) -> None:
        """Until at most so many bytes are on their way; 0: until nothing is."""
        while self._pending and (self._pending_bytes > most or most == 0):
            future, size = self._pending.popleft()
            future.result()
            self._pending_bytes -= size

    def _copied(self, gradient: Tensor, host: Tensor) -> torch.cuda.Event | None:
        """Copy a gradient, on CUDA beside what the current stream goes on with; when it is done."""
        if self._stream is None:
            host.copy_(gradient)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(self._stream):
            host.copy_(gradient, non_blocking=True)
        gradient.record_stream(self._stream)
        copied = torch.cuda.Event()
        copied.record(self._stream)
        return copied

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        return self._arrived.get(parameter)

    def _copy(self, parameter: Tensor) -> Tensor:
        held = self._buffers.get(parameter)
        return own_data(parameter) if held is None else held[0]

    def _moments(self, parameter: Tensor) -> dict[str, Tensor]:
        names = self.state_names(parameter)
        made = (self.empty_state(parameter, name) for name in names)
        return dict(zip(names, offload.new_state(self, made), strict=True))

    def _bring_home(self, parts: list[Part]) -> None:
        """Copy them to the device, beside what the cores do next."""
        moved = [part for part in parts if part.home is not part.parameter]
        if self._stream is None:
            for part in moved:
                part.home.copy_(part.parameter)
            return
        with torch.cuda.stream(self._stream):
            for part in moved:
                part.home.copy_(part.parameter, non_blocking=True)


def _arrive(copied: torch.cuda.Event | None, sent: Tensor, target: Tensor) -> None:
    """Wait for a copy; add it to what earlier micro-batches have brought."""
    if copied is not None:
        copied.synchronize()
    if sent is not target:
        target.add_(sent)
