import pytest
import torch

from ppo.metrics import Metrics
from tests.peak_memory import PeakTracker

CPU = torch.device("cpu")


def test_peak_counts_what_is_alive_at_once_and_storages_once():
    with PeakTracker(CPU) as tracker:
        first = torch.zeros(1000)
        views = [first[i:] for i in range(5)]
        second = first + 1
        del first, views
        third = torch.empty(500, dtype=torch.float64)
        assert tracker.peak_bytes == 8000
        second.add_(1)
        fourth = torch.cat([third, third])
    assert tracker.peak_bytes == 4000 + 4000 + 8000
    assert len(fourth) == 1000


def test_tensors_of_the_time_before_count_only_when_watched():
    old = torch.zeros(100)
    with PeakTracker(CPU) as tracker:
        old.mul_(2)
        _ = old[:10].clone()
    assert tracker.peak_bytes == 40
    with PeakTracker(CPU) as tracker:
        tracker.watch([old])
        _ = old[:10].clone()
    assert tracker.peak_bytes == 440


def test_resized_storage_counts_with_its_new_size():
    with PeakTracker(CPU) as tracker:
        tensor = torch.zeros(100)
        tensor.untyped_storage().resize_(0)
        other = torch.zeros(100)
        assert tracker.peak_bytes == 400
        tensor.untyped_storage().resize_(400)
        del other
    assert tracker.peak_bytes == 800


def test_gradients_count_and_nested_trackers_see_the_same():
    weight = torch.zeros(100, requires_grad=True)
    with PeakTracker(CPU) as outer:
        outer.watch([weight])
        with PeakTracker(CPU) as inner:
            (weight * 2).sum().backward()
        before = inner.peak_bytes
        kept = torch.zeros(10000)
    assert inner.peak_bytes == before
    assert outer.peak_bytes >= 40000 + 400 + 400
    assert len(kept) == 10000


class Allocator:
    """The counters of CUDA's allocator, without a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = 0
        for name, function in {
            "memory_allocated": lambda _=None: self.now,
            "max_memory_allocated": lambda _=None: self.peak,
            "reset_peak_memory_stats": self.reset,
            "synchronize": lambda _=None: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def reset(self, _device: torch.device | None = None) -> None:
        self.peak = self.now

    def holds(self, num_bytes: int) -> None:
        self.now, self.peak = num_bytes, max(self.peak, num_bytes)


def test_a_peak_on_a_device_outlives_the_phases_that_are_timed_inside(monkeypatch):
    allocator, cuda = Allocator(monkeypatch), torch.device("cuda")
    metrics, reset = Metrics(cuda), torch.cuda.reset_peak_memory_stats
    allocator.holds(1 << 30)
    with PeakTracker(cuda) as outer:
        allocator.holds(5 << 30)
        with metrics.timed("first"):
            allocator.holds(3 << 30)
        with PeakTracker(cuda) as inner, metrics.timed("second"):
            allocator.holds(2 << 30)
        allocator.holds(0)
    assert torch.cuda.reset_peak_memory_stats == reset
    assert (outer.peak_bytes, outer.extra_bytes) == (5 << 30, 4 << 30)
    assert inner.peak_bytes == 3 << 30  # what the phase before it had left
    values = metrics.reduce()
    assert (values["memory_gib/first"], values["memory_gib/second"]) == (5, 3)
