"""Real exchanges on gloo ranks: what arrives, how many bytes, and how much memory."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from sharding.fsdp import shard_model
from sharding.layout import Style, row_parallel_weight, view_2d
from sharding.mesh import Mesh, ParallelDims, build_mesh
from sharding.reshard.checksums import Checksums
from sharding.reshard.full_tensors import FullTensors
from sharding.reshard.resharder import Resharder
from tests.distributed import run_distributed
from tests.peak_memory import PeakTracker
from tests.sharding.reshard.engine_slices import hf_slices, sglang_slices

MIB = 2**20
CPU, DTYPE = torch.device("cpu"), torch.bfloat16
VOCAB = 197  # divides by nothing, and SGLang pads it


class Case(NamedTuple):
    shard_size: int
    tp: int
    style: Style = "sglang"
    aligned: bool = False
    dtype: torch.dtype = DTYPE
    bucket_mib: float = 0.06


def small_model(*, layers: int = 2, **sizes: int):
    """The same on every rank; shards of vectors and biases are uneven for F = 8."""
    torch.manual_seed(0)
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 40,
        "intermediate_size": 104,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "attention_bias": True,
        "tie_word_embeddings": False,
        **sizes,
    }
    config = Qwen3Config(**values)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def expected(full: dict[str, Tensor], case: Case, rank: int) -> dict[str, Tensor]:
    tp_rank = rank % case.tp
    if case.style == "hf":
        return hf_slices(full, tp=case.tp, tp_rank=tp_rank)
    return sglang_slices(full, heads=8, kv_heads=2, tp=case.tp, tp_rank=tp_rank)


def shard(model, mesh: Mesh, *, aligned: bool = False, reshard_after_forward: bool = True) -> None:
    shard_model(
        model,
        mesh,
        param_dtype=torch.float32,
        reduce_dtype=torch.float32,
        reshard_after_forward=reshard_after_forward,
        shard_dim1=row_parallel_weight("qwen3") if aligned else None,
    )


def resharder_of(model, mesh: Mesh, case: Case) -> Resharder:
    return Resharder(
        model,
        mesh,
        style=case.style,
        hf_config=model.config,
        dtype=case.dtype,
        bucket_mib=case.bucket_mib,
    )


def receive(resharder: Resharder, got: dict[str, Tensor]) -> Checksums:
    """Load all buckets into ``got``, as an engine does."""
    checksums = Checksums(resharder.layout)
    for bucket in resharder.buckets():
        checksums.add(bucket)
        for entry, block in bucket.views():
            rows = slice(entry.dst_row, entry.dst_row + entry.rows)
            got[entry.target][rows, entry.dst_col : entry.dst_col + entry.cols] = block
        for zero in bucket.zeros:
            got[zero.target][zero.row :, zero.col :] = 0
    return checksums


def empty_engine(resharder: Resharder, dtype: torch.dtype) -> dict[str, Tensor]:
    targets = resharder.layout.targets.items()
    return {name: torch.full(size, float("nan"), dtype=dtype) for name, size in targets}


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor], where: object) -> None:
    assert got.keys() == wanted.keys(), where
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor.reshape(view_2d(tensor.shape))), (name, where)


def run_case(rank: int, world_size: int, ranks_per_node: int, case: Case):
    """One reshard of a fresh model; (stats, plan's two bounds) of this rank."""
    dims = ParallelDims(
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        fsdp_size=case.shard_size,
        rollout_tp=case.tp,
    )
    mesh = build_mesh(dims, CPU)
    model = small_model()
    full = {name: p.detach().to(case.dtype, copy=True) for name, p in model.named_parameters()}
    shard(model, mesh, aligned=case.aligned)
    resharder = resharder_of(model, mesh, case)
    got = empty_engine(resharder, case.dtype)
    checksums = receive(resharder, got)
    assert_equal(got, expected(full, case, rank), case)
    assert checksums.differing(got) == []
    got["model.norm.weight"][3, 0] += 1
    assert checksums.differing(got) == ["model.norm.weight"]
    stats, plan, index = resharder.stats, resharder.plan, mesh.shard_index
    assert stats.received_bytes == plan.received_bytes()[index]
    assert stats.internode_bytes == plan.internode_bytes()[index]
    return stats, plan.lower_bound_bytes()[index], plan.internode_lower_bound_bytes().tolist()


def on_one_node(rank: int, world_size: int):
    cases = [
        Case(4, 1),
        Case(4, 2),
        Case(4, 4, "hf", aligned=True, dtype=torch.float32),
        Case(4, 4, aligned=True),
        Case(2, 4),
        Case(1, 2, "hf"),
    ]
    results = [(case, run_case(rank, world_size, world_size, case)) for case in cases]
    check_training_moves_the_engine(rank, world_size)
    check_memory(world_size)
    check_full_tensors(world_size)
    return results


def check_training_moves_the_engine(rank: int, world_size: int) -> None:
    """After a step, and while FSDP still keeps gathered parameters, the new weights arrive."""
    case = Case(world_size, 2, dtype=torch.float32)
    mesh = build_mesh(ParallelDims(world_size=world_size, ranks_per_node=4, rollout_tp=2), CPU)
    reference, model = small_model(), small_model()
    shard(model, mesh, reshard_after_forward=False)
    resharder = resharder_of(model, mesh, case)
    got = empty_engine(resharder, case.dtype)
    receive(resharder, got)
    tokens = torch.arange(12).view(1, 12)
    for part in (reference, model):
        part(input_ids=tokens, labels=tokens).loss.backward()
        with torch.no_grad():
            for parameter in part.parameters():
                parameter -= 0.1 * parameter.grad
    with torch.no_grad():
        model(input_ids=tokens)  # leaves the parameters gathered
    receive(resharder, got)
    wanted = expected({n: p.detach() for n, p in reference.named_parameters()}, case, rank)
    for name, tensor in wanted.items():
        assert torch.allclose(got[name], tensor.reshape(got[name].shape), atol=1e-6), name


def check_memory(world_size: int) -> None:
    """A model of 220 MB comes through two buckets of 4 MiB: nothing else is allocated."""
    bucket_mib = 4
    dims = ParallelDims(world_size=world_size, ranks_per_node=world_size, rollout_tp=2)
    mesh = build_mesh(dims, CPU)
    with torch.device("meta"):
        model = small_model(hidden_size=1024, intermediate_size=2816, head_dim=128, layers=9)
    assert sum(p.numel() for p in model.parameters()) * 2 > 200e6
    shard(model, mesh)
    model.to_empty(device=CPU)
    resharder = resharder_of(model, mesh, Case(world_size, 2, bucket_mib=bucket_mib))
    got = {n: torch.empty(s, dtype=DTYPE) for n, s in resharder.layout.targets.items()}
    with PeakTracker(CPU) as tracker:
        for bucket in resharder.buckets():
            for entry, block in bucket.views():
                rows = slice(entry.dst_row, entry.dst_row + entry.rows)
                got[entry.target][rows, entry.dst_col : entry.dst_col + entry.cols].copy_(block)
            del bucket, block
    assert resharder.stats.num_buckets > 20
    assert 0 < tracker.extra_bytes == resharder.stats.peak_extra_bytes <= 2 * bucket_mib * MIB


def check_full_tensors(world_size: int) -> None:
    """The generic path gives every parameter whole, some layers at a time."""
    mesh = build_mesh(ParallelDims(world_size=world_size, ranks_per_node=4, rollout_tp=2), CPU)
    model = small_model()
    full = {name: p.detach().clone() for name, p in model.named_parameters()}
    shard(model, mesh)
    batches = list(FullTensors(model, mesh, dtype=torch.float32, bucket_mib=0.06).batches())
    assert len(batches) > 2
    got = {name: tensor for batch in batches for name, tensor in batch}
    assert got.keys() == full.keys()
    for name, tensor in full.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.distributed
def test_one_node_receives_exactly_the_lower_bound():
    by_rank = run_distributed(on_one_node, 4)
    for results in by_rank:
        for case, (stats, bound, _) in results:
            assert stats.received_bytes == bound == stats.lower_bound_bytes, case
            assert stats.internode_bytes == 0
            assert 0 < stats.peak_extra_bytes <= 2 * case.bucket_mib * MIB
    quarter = VOCAB * 40 // 4  # elements of one shard of the embedding
    stats_of = {case: stats for case, (stats, *_) in by_rank[0]}
    assert stats_of[Case(4, 1)].received_bytes > 3 * quarter * 2
    assert stats_of[Case(1, 2, "hf")].received_bytes == 0


def on_two_nodes(rank: int, world_size: int):
    cases = [Case(8, 1), Case(8, 2), Case(8, 4, aligned=True), Case(4, 4)]
    return [(case, run_case(rank, world_size, 4, case)) for case in cases]


@pytest.mark.distributed
def test_shards_cross_between_two_nodes_once_per_node():
    by_rank = run_distributed(on_two_nodes, 8)
    for results in zip(*by_rank, strict=True):
        case = results[0][0]
        stats = [of_rank[0] for _, of_rank in results]
        crossed = [sum(s.internode_bytes for s in stats[first : first + 4]) for first in (0, 4)]
        if case.shard_size == 4:
            assert crossed == [0, 0]
            continue
        bounds = results[0][1][2]
        assert crossed == bounds
        assert min(bounds) > 0
        shares = [s.internode_lower_bound_bytes for s in stats]
        assert [sum(shares[:4]), sum(shares[4:])] == bounds
