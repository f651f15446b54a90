"""Degrees of the meshes, without processes."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from sharding.dims import ParallelDims
from sharding.groups import timeout_of
from sharding.mesh import MeshError, build_mesh, init_distributed
from tests.distributed import run_distributed


def test_one_node_shards_over_all_ranks_and_several_nodes_over_the_ranks_of_one():
    one = ParallelDims(world_size=8, ranks_per_node=8)
    assert (one.shard_size, one.dp_replicate, one.strategy) == (8, 1, "FULL_SHARD")
    four = ParallelDims(world_size=32, ranks_per_node=8)
    assert (four.shard_size, four.dp_replicate, four.strategy) == (8, 4, "HYBRID_SHARD")
    assert four.resolve() == ParallelDims(world_size=32, ranks_per_node=8, fsdp_size=8)


def test_axes_multiply_to_the_world_with_sp_inside_the_shard_group():
    dims = ParallelDims(world_size=16, ranks_per_node=8, fsdp_size=8, sp=2, rollout_tp=4)
    assert (dims.nodes, dims.dp_replicate, dims.dp_shard, dims.dp) == (2, 2, 4, 8)
    assert dims.rollout_dp == 4
    assert dims.sp_rows()[:2] == [[0, 1], [2, 3]]


def test_a_shard_size_of_one_is_no_shard():
    dims = ParallelDims(world_size=4, ranks_per_node=4, fsdp_size=1)
    assert (dims.strategy, dims.dp_replicate) == ("NO_SHARD", 4)
    assert dims.shard_rows() == [[0], [1], [2], [3]]


def test_the_shard_axis_is_ordered_by_the_tp_rank_of_generation():
    # the order of recipes for F = 4, T = 2: ranks 0 and 2 (t = 0) hold the first half
    hybrid = ParallelDims(world_size=8, ranks_per_node=8, fsdp_size=4, rollout_tp=2)
    assert hybrid.shard_rows() == [[0, 2, 1, 3], [4, 6, 5, 7]]
    assert hybrid.replicate_rows() == [[0, 4], [2, 6], [1, 5], [3, 7]]
    full = ParallelDims(world_size=8, ranks_per_node=4, fsdp_size=8, rollout_tp=4)
    assert full.shard_rows() == [[0, 4, 1, 5, 2, 6, 3, 7]]


def test_ranks_keep_their_order_where_tp_does_not_divide_the_shard_group():
    dims = ParallelDims(world_size=4, ranks_per_node=4, fsdp_size=2, rollout_tp=4)
    assert dims.shard_rows() == [[0, 1], [2, 3]]


DEGREES = st.sampled_from([1, 2, 3, 4, 6, 8])


@given(nodes=DEGREES, per_node=DEGREES, shard=DEGREES, sp=DEGREES, tp=DEGREES)
def test_every_possible_mesh_covers_all_ranks_once_and_nests_shards_in_tp_slices(
    nodes, per_node, shard, sp, tp
):
    dims = ParallelDims(
        world_size=nodes * per_node, ranks_per_node=per_node, fsdp_size=shard, sp=sp, rollout_tp=tp
    )
    if dims.problems():
        return
    assert dims.dp_replicate * dims.dp_shard * dims.sp == dims.world_size
    for rows in (dims.shard_rows(), dims.sp_rows(), dims.rollout_rows()):
        assert sorted(rank for row in rows for rank in row) == list(range(dims.world_size))
    if shard % tp == 0:
        for row in dims.shard_rows():
            for index, rank in enumerate(row):
                # the index-th F-th of a weight lies in the (rank % T)-th T-th of it
                assert index * tp // shard == rank % tp


@pytest.mark.parametrize(
    ("degrees", "name", "possible"),
    [
        ({"fsdp_size": 3}, "fsdp_size 3", "possible: 1, 2, 4, 8"),
        ({"fsdp_size": 0}, "fsdp_size 0", "possible: 1, 2, 4, 8"),
        ({"fsdp_size": 2, "sp": 4}, "fsdp_size 2", "multiple of sp 4 (possible: 4, 8)"),
        ({"sp": 3}, "sp 3", "possible: 1, 2, 4, 8"),
        ({"rollout_tp": 8}, "rollout_tp 8", "4 ranks of a node (possible: 1, 2, 4)"),
        ({"ranks_per_node": 3}, "ranks_per_node 3", "possible: 1, 2, 4, 8"),
        ({"ranks_per_node": 0}, "world_size 8", "at least 1"),
    ],
)
def test_an_impossible_degree_names_the_possible_ones(degrees, name, possible):
    dims = ParallelDims(**{"world_size": 8, "ranks_per_node": 4, **degrees})
    (problem,) = dims.problems()
    assert problem.startswith(name)
    assert possible in problem


def test_all_problems_are_listed_at_once():
    dims = ParallelDims(world_size=8, ranks_per_node=4, fsdp_size=5, rollout_tp=3)
    assert [p.split()[0] for p in dims.problems()] == ["fsdp_size", "rollout_tp"]


def test_degrees_are_known_without_importing_torch():
    code = "import sys, sharding.dims; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def _groups(rank: int, world_size: int) -> list[tuple]:
    """Members of every group of this rank, by two meshes of four ranks."""
    seen = []
    for dims in (
        ParallelDims(world_size=4, ranks_per_node=4, rollout_tp=2),
        ParallelDims(world_size=4, ranks_per_node=2, sp=2),
    ):
        mesh = build_mesh(dims, torch.device("cpu"))
        names = (
            *("shard_group", "replicate_group", "sp_group", "rollout_group"),
            *("dp_group", "node_group"),
        )
        for name in names:
            group = getattr(mesh, name)
            members = [torch.zeros(1, dtype=torch.long) for _ in range(group.size())]
            dist.all_gather(members, torch.tensor([rank]), group=group)
            seen.append(tuple(int(m) for m in members))
        seen.append(tuple(mesh.fsdp.get_coordinate() or ()))
        seen.append((mesh.shard_index, mesh.replicate_rank, mesh.dp_rank, mesh.sp_rank))
        assert mesh.fsdp.mesh_dim_names == (
            ("fsdp",) if dims.dp_replicate == 1 else ("dp_replicate", "fsdp")
        )
    whole = build_mesh(ParallelDims(world_size=4, ranks_per_node=4, sp=4), torch.device("cpu"))
    assert whole.sp_group is not whole.shard_group  # or heads would wait for gathered layers
    with pytest.raises(MeshError, match="possible: 1, 2, 4"):
        build_mesh(ParallelDims(world_size=4, ranks_per_node=4, fsdp_size=3), torch.device("cpu"))
    return seen


@pytest.mark.distributed
def test_groups_hold_the_ranks_of_their_axis_in_its_order():
    results = run_distributed(_groups, 4)
    assert results[2] == [
        (0, 2, 1, 3),  # shard: TP rank 0 of both replicas first
        (2,),
        (2,),
        (2, 3),
        (0, 1, 2, 3),  # dp
        (0, 1, 2, 3),  # node
        (1,),  # coordinate on the permuted axis
        (1, 0, 2, 0),
        (2, 3),  # hybrid: the node's ranks
        (0, 2),
        (2, 3),
        (2,),
        (0, 2),
        (2, 3),
        (1, 0),
        (0, 1, 1, 0),
    ]


def test_groups_are_as_patient_as_the_default_group_and_device_groups_have_a_limit_of_their_own():
    cpu, limits = torch.device("cpu"), []
    with init_distributed(cpu, timeout_s=88):
        dims = ParallelDims(world_size=1, ranks_per_node=1)
        for mesh in (build_mesh(dims, cpu, timeout_s=77), build_mesh(dims, cpu)):
            groups = (mesh.shard_group, mesh.host_group, mesh.rollout_host_group)
            limits.append([timeout_of(group).total_seconds() for group in groups])
            assert timeout_of(mesh.device_group([0])).total_seconds() == limits[-1][0]
    assert limits == [[77, 88, 88], [88, 88, 88]]


def test_plain_python_is_a_world_of_one_without_a_port():
    with init_distributed(torch.device("cpu")):
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), torch.device("cpu"))
        total = torch.ones(1)
        dist.all_reduce(total, group=mesh.host_group)
        assert total.item() == 1
    assert not dist.is_initialized()
