"""Traces made by hand, whose overlaps are known."""

import gzip
import json
from typing import Any

import pytest

from ppo.tracking.trace import length, read_events, summarise, union


def event(cat: str, name: str, start: float, end: float, tid: int = 1) -> dict[str, Any]:
    """Times in milliseconds; a trace has microseconds."""
    ts, dur = 1e3 * start + 5e9, 1e3 * (end - start)
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": tid}


DEVICE = [
    event("cpu_op", "aten::mm", 0, 1),
    event("kernel", "gemm", 10, 20, tid=7),
    event("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", 15, 30, tid=8),
    event("kernel", "gemm", 25, 40, tid=7),  # 5 ms of the all-gather stand alone
    event("kernel", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 38, 50, tid=9),  # 2 hidden
    event("kernel", "ncclDevKernel_AllReduce_Sum_f32", 45, 55, tid=8),  # beside the other: once
    event("kernel", "add", 60, 61, tid=7),
    event("gpu_memcpy", "Memcpy HtoD", 61, 70, tid=7),
    event("cuda_runtime", "cudaStreamSynchronize", 2, 9),
    event("cuda_runtime", "cudaDeviceSynchronize", 70, 100),
    event("cuda_runtime", "cudaLaunchKernel", 1, 2),
]


def test_communication_is_hidden_where_something_is_computed_and_exposed_elsewhere():
    found = summarise(DEVICE)
    assert found.window_s == pytest.approx(0.100)
    assert found.compute_s == pytest.approx(0.026)
    assert found.comm_s == pytest.approx(0.015 + 0.017)
    assert found.exposed_s == pytest.approx(0.005 + 0.015)
    assert found.hidden_s == pytest.approx(0.012)
    assert found.all_gather_s == pytest.approx(0.015)
    assert found.reduce_scatter_s == pytest.approx(0.012)
    assert found.idle_s == pytest.approx(0.100 - 0.026 - 0.020)
    assert found.syncs[1:] == (2, pytest.approx(0.037))
    assert [work[:2] for work in found.top] == [("gemm", 2), ("add", 1)]
    metrics = found.metrics()
    assert metrics["timing_share/comm"] == pytest.approx(0.2)
    assert metrics["profile/host_syncs"] == 2


def test_on_a_cpu_operations_inside_others_count_once_and_gloo_tells_its_collectives():
    trace = [
        event("cpu_op", "aten::linear", 0, 10),
        event("cpu_op", "aten::mm", 1, 9),
        event("cpu_op", "c10d::_allgather_base_", 10, 11),
        event("user_annotation", "gloo:all_gather", 8, 20, tid=2),
        event("cpu_op", "aten::mul", 15, 18),
        event("cpu_op", "aten::mul", 15, 30, tid=3),
    ]
    found = summarise(trace)
    assert [tuple(work) for work in found.top] == [
        ("aten::mul", 2, pytest.approx(0.018)),
        ("aten::linear", 1, pytest.approx(0.010)),
    ]
    assert (found.comm_s, found.exposed_s) == (pytest.approx(0.012), pytest.approx(0.005))
    assert found.all_gather_s == pytest.approx(0.012) and found.syncs.count == 0


def test_nothing_recorded_is_no_time_at_all():
    found = summarise([])
    assert set(found.metrics().values()) == {0.0}
    assert "| window | 0.00 | 0.0 % |" in found.table()


def test_the_union_of_intervals_and_its_length():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4), (1, 1.5)]) == [(0, 4), (5, 6)]
    assert length(union([(5, 6), (0, 2), (1, 3)])) == 4


def test_events_without_a_duration_are_left_out_of_a_zipped_trace(tmp_path):
    path = tmp_path / "rank_0000.trace.json.gz"
    trace = {"traceEvents": [*DEVICE, {"ph": "M", "name": "process_name"}]}
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    assert read_events(path) == DEVICE
