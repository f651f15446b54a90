"""The reshard on real GPUs: streams, offloaded shards, NCCL. Not part of CI."""

import pytest
import torch
from torch.multiprocessing.spawn import spawn

from sharding.mesh import Mesh, ParallelDims, build_mesh, init_distributed
from sharding.offload import offload_module, reload_module
from sharding.reshard.resharder import Resharder
from tests.peak_memory import PeakTracker
from tests.sharding.reshard.test_resharder import (
    MIB,
    Case,
    expected,
    receive,
    resharder_of,
    shard,
    small_model,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def cuda_rank(rank: int, world_size: int, rendezvous: str, case: Case) -> None:
    device = torch.device("cuda", rank)
    with init_distributed(device, rank=rank, world_size=world_size, init_method=rendezvous):
        check_rank(device, world_size, case)


def check_rank(device: torch.device, world_size: int, case: Case) -> None:
    dims = ParallelDims(world_size=world_size, ranks_per_node=world_size, rollout_tp=case.tp)
    mesh = build_mesh(dims, device)
    reference = small_model()
    full = {name: p.detach().to(case.dtype) for name, p in reference.named_parameters()}
    model = small_model().to(device)
    shard(model, mesh)
    resharder = resharder_of(model, mesh, case)
    check(resharder, full, mesh, case)
    offload_module(model)
    check(resharder, full, mesh, case)
    reload_module(model, device)
    check(resharder, full, mesh, case)


def check(resharder: Resharder, full: dict, mesh: Mesh, case: Case) -> None:
    targets = resharder.layout.targets.items()
    nan = float("nan")
    got = {n: torch.full(s, nan, dtype=case.dtype, device=mesh.device) for n, s in targets}
    with PeakTracker(mesh.device) as tracker:
        for bucket in resharder.buckets():
            for entry, block in bucket.views():
                rows = slice(entry.dst_row, entry.dst_row + entry.rows)
                got[entry.target][rows, entry.dst_col : entry.dst_col + entry.cols].copy_(block)
            del bucket, block
    assert tracker.extra_bytes <= 2 * case.bucket_mib * MIB + largest_parameter(full)
    sums = receive(resharder, got)
    assert sums.differing(got) == []
    for name, tensor in expected(full, case, mesh.rank).items():
        assert torch.equal(got[name].cpu(), tensor.reshape(got[name].shape)), name
    stats = resharder.stats
    assert stats.received_bytes == stats.lower_bound_bytes


def largest_parameter(full: dict) -> int:
    """Bytes of the largest possible cut in float32, and the allocator's rounding."""
    return max(4 * tensor.numel() for tensor in full.values()) + MIB


@pytest.mark.parametrize("tp", [1, 2])
def test_slices_are_right_on_every_gpu(tp, tmp_path):
    num_gpus = torch.cuda.device_count()
    if num_gpus % tp:
        pytest.skip(f"{num_gpus} GPUs")
    case = Case(num_gpus, tp, bucket_mib=0.06)
    spawn(cuda_rank, (num_gpus, f"file://{tmp_path}/rendezvous", case), nprocs=num_gpus)
