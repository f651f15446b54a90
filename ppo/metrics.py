"""One step's metrics: filled without waiting for the device, reduced over ranks once.

Owns how numbers of many micro-batches and ranks become one (token-weighted, never a mean of means),
and timing. Must not know what is measured, or where the numbers are written (ppo/tracking/).
"""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.agree import gather
from sharding.progress import PROGRESS

Number = float | Tensor


class Metrics:
    """Collects one step. Tensors stay on their device until `reduce`.

    Ranks may hold different names: a rank without tokens need not add what it did not compute.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """`device` is the one that `timed` waits for; None or a CPU: nothing to wait for."""
        self._cuda = device if device is not None and device.type == "cuda" else None
        self._sums: dict[str, tuple[Number, Number]] = {}
        self._largest: dict[str, Number] = {}
        self._smallest: dict[str, Number] = {}
        self._seconds: dict[str, float] = {}
        self._same: dict[str, float] = {}
        self._peaks: list[int] = []  # bytes, of the blocks of `timed` that are open
        self._lap: dict[str, tuple[Number, Number]] = {}

    def add(self, name: str, total: Number, count: Number) -> None:
        """Add a sum over `count` items; the metric is all ranks' totals over their counts."""
        total, count = _detached(total), _detached(count)
        for sums in (self._sums, self._lap) if name in self._lap else (self._sums,):
            old_total, old_count = sums.get(name, (0.0, 0.0))
            sums[name] = (old_total + total, old_count + count)

    def watch(self, names: Iterable[str]) -> None:
        """Sum up these besides, from now on and until `lap`."""
        self._lap = dict.fromkeys(names, (0.0, 0.0))

    def lap(self) -> dict[str, tuple[Number, Number]]:
        """Total and count that this rank has added to each watched name since `watch`."""
        sums, self._lap = self._lap, {}
        return sums

    @property
    def known(self) -> dict[str, float]:
        """What is the same on every rank already."""
        return dict(self._same)

    def maximum(self, name: str, value: Number) -> None:
        """Keep the largest value of all calls and ranks."""
        self._largest[name] = _larger(self._largest.get(name, -math.inf), _detached(value))

    def minimum(self, name: str, value: Number) -> None:
        """Keep the smallest value of all calls and ranks."""
        self._smallest[name] = -_larger(-self._smallest.get(name, math.inf), -_detached(value))

    def set(self, name: str, value: float) -> None:
        """Set a value that is the same on every rank already; not reduced."""
        self._same[name] = float(value)

    def count(self, name: str, number: float) -> None:
        """Add to a value that is the same on every rank already, and begins at 0."""
        self._same[name] = self._same.get(name, 0.0) + number

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of the block to timing_s/NAME; the slowest rank counts, in seconds.

        On CUDA the device memory that tensors held at most goes to memory_gib/NAME. Blocks may
        stand inside others, which then count what happens in the inner ones too. The block is a
        phase of the process (sharding/progress.py).

        A block that is left by an exception is not timed: the device may be waiting for ranks that
        will not come, and would be waited for.
        """
        with PROGRESS.during(name):
            start, depth = self._now(), len(self._peaks)
            self._open_peak()
            try:
                yield
            except BaseException:
                del self._peaks[depth:]
                raise
            elapsed = self._now() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed
            self._close_peak(name)

    def reduce(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """The values of the step, equal on every rank; one exchange over `group`.

        Collective: every rank calls it once, at the end of the step. Use a host group, where
        nothing is copied to a device. A mean over no items is left out; NaN wins over numbers.
        """
        mine = {
            "total": {name: total for name, (total, _) in self._sums.items()},
            "count": {name: count for name, (_, count) in self._sums.items()},
            "max": {**self._largest, **{f"timing_s/{k}": v for k, v in self._seconds.items()}},
            "min": self._smallest,
        }
        mine = _on_host(mine)
        parts = [mine] if group is None else gather(mine, group)
        values = dict(self._same)
        totals, counts = _merged(parts, "total", torch.sum), _merged(parts, "count", torch.sum)
        values |= {name: totals[name] / count for name, count in counts.items() if count != 0}
        values |= _merged(parts, "max", torch.amax) | _merged(parts, "min", torch.amin)
        return dict(sorted(values.items()))

    def peak_share(self) -> float:
        """Share of the device's memory that tensors held at most since the last call, or since the
        innermost block of `timed` began; 0 off CUDA."""
        if self._cuda is None or not self._peaks:
            return 0.0
        peak = torch.cuda.max_memory_allocated(self._cuda)
        self._peaks[-1] = max(self._peaks[-1], peak)
        torch.cuda.reset_peak_memory_stats(self._cuda)
        return peak / torch.cuda.get_device_properties(self._cuda).total_memory

    def _open_peak(self) -> None:
        """Start a block; what was the peak so far is the surrounding block's."""
        if self._cuda is not None:
            if self._peaks:
                self._peaks[-1] = max(self._peaks[-1], torch.cuda.max_memory_allocated(self._cuda))
            torch.cuda.reset_peak_memory_stats(self._cuda)
            self._peaks.append(0)

    def _close_peak(self, name: str) -> None:
        if self._cuda is not None:
            peak = max(self._peaks.pop(), torch.cuda.max_memory_allocated(self._cuda))
            if self._peaks:
                self._peaks[-1] = max(self._peaks[-1], peak)
            self.maximum(f"memory_gib/{name}", peak / 2**30)

    def _now(self) -> float:
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
        return time.perf_counter()


def timing_shares(values: dict[str, float]) -> dict[str, float]:
    """timing_share/{gen, reshard}: their part of timing_s/step, 0 to 1, where they were timed."""
    step = values.get("timing_s/step", 0.0)
    return {
        f"timing_share/{name}": values[f"timing_s/{name}"] / step
        for name in ("gen", "reshard")
        if step > 0 and f"timing_s/{name}" in values
    }


def _detached(value: Number) -> Number:
    # float64: a float32 sum of a long batch would lose single tokens
    return value.detach().double() if isinstance(value, Tensor) else float(value)


def _larger(a: Number, b: Number) -> Number:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.maximum(a, b)
    if isinstance(a, Tensor):
        return a.clamp(min=b)  # unlike a tensor of b, it needs no copy that the host waits for
    if isinstance(b, Tensor):
        return b.clamp(min=a)
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def _on_host(tables: dict[str, dict[str, Number]]) -> dict[str, dict[str, float]]:
    """All tensors as floats with one copy from each device."""
    tensors: dict[torch.device, list[Tensor]] = {}
    for table in tables.values():
        for value in table.values():
            if isinstance(value, Tensor):
                tensors.setdefault(value.device, []).append(value.reshape(()))
    numbers = {device: iter(torch.stack(t).tolist()) for device, t in tensors.items()}
    return {
        kind: {
            name: next(numbers[value.device]) if isinstance(value, Tensor) else value
            for name, value in table.items()
        }
        for kind, table in tables.items()
    }


def _merged(parts: list[dict[str, dict[str, float]]], kind: str, reduce: Any) -> dict[str, float]:
    """Reduce what the ranks hold of each name, in rank order: the same result everywhere."""
    columns: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part[kind].items():
            columns.setdefault(name, []).append(value)
    return {
        name: float(reduce(torch.tensor(column, dtype=torch.float64)))
        for name, column in columns.items()
    }
