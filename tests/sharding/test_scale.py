"""What a rank computes by itself in a job of 64, 256 and 1,024 ranks, simulated in one process.

Limits are CPU seconds of one thread, several times what a busy machine of 2026 takes.
"""

import inspect
import time
from datetime import timedelta
from functools import wraps

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from sharding.dims import ParallelDims
from sharding.mesh import Mesh, build_mesh
from sharding.partition import Budget, assign, count_micro_batches, micro_batches
from sharding.reshard.__main__ import QWEN2_5, model_plan
from sharding.reshard.exchange import Link, make_links

CPU = torch.device("cpu")
WORLDS = (64, 256, 1024)
GROUPS = (
    *("host_group", "dp_group", "node_group", "shard_group", "replicate_group", "sp_group"),
    *("rollout_group", "rollout_host_group"),
)

DEVICE_GROUPS = ("shard_group", "replicate_group", "sp_group", "rollout_group")


def build(
    dims: ParallelDims, rank: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Mesh, tuple[Link | None, Link], dict[str, list[int]], list[list[int]]]:
    """The mesh and the reshard's links of one rank of many, over torch's process groups that send
    nothing; the members of its groups, and those of each group that it made or sat out."""
    made, new_group = [], dist.new_group

    @wraps(new_group)
    def recorded(ranks: list[int], **options: object) -> object:
        made.append(ranks)
        return new_group(ranks, **options)  # pyright: ignore[reportArgumentType]

    for module in ("groups", "mesh"):
        monkeypatch.setattr(f"sharding.{module}.HOST", "fake")
    monkeypatch.setattr("sharding.mesh.timeout_of", lambda group: timedelta(seconds=60))
    monkeypatch.setattr(dist, "new_group", recorded)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=dims.world_size)
    try:
        mesh = build_mesh(dims, CPU)
        links = make_links(mesh)
        members = {n: dist.get_process_group_ranks(getattr(mesh, n)) for n in GROUPS}
        return mesh, links, members, made
    finally:
        dist.destroy_process_group()
        monkeypatch.undo()


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="this torch sorts the ranks of a group",
)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(
    "degrees",
    [{"fsdp_size": 8, "rollout_tp": 2}, {"sp": 2, "rollout_tp": 4}, {"rollout_tp": 8}],
    ids=["a node", "half", "all"],
)
def test_every_rank_makes_the_same_groups_in_the_same_order(world_size, degrees, monkeypatch):
    degrees = {"fsdp_size": world_size // degrees.get("sp", 1), **degrees}
    dims = ParallelDims(world_size=world_size, ranks_per_node=8, **degrees)
    start, orders = time.process_time(), []
    for rank in (0, world_size // 2 + 3, world_size - 1):
        mesh, (cross, inner), members, made = build(dims, rank, monkeypatch)
        orders.append(made)
        assert all(rank in ranks for ranks in members.values())
        assert members["shard_group"] == dims.shard_rows()[mesh.replicate_rank]
        assert len(members["node_group"]) == 8
        assert len(members["dp_group"]) * dims.sp == world_size
        two_levels = dims.shard_size > 8
        assert (cross is not None) == two_levels
        assert len(inner.away) == 8 and not any(inner.away)
        if cross is not None:  # the ranks at this one's place on every node of the shard group
            assert (
                len(cross.away) == dims.shard_size // 8 and sum(cross.away) == len(cross.away) - 1
            )
        own = [members[name] for name in DEVICE_GROUPS if len(members[name]) > 1]
        assert len(own) + (2 if cross is not None else 0) == dims.num_communicators
    assert orders[0] == orders[1] == orders[2]
    unique = {tuple(ranks) for ranks in orders[0]}
    assert len(orders[0]) <= 3 * len(unique), "groups that nobody needs twice"
    assert time.process_time() - start < 3.0


@pytest.mark.parametrize("world_size", WORLDS)
def test_sequences_of_a_large_batch_are_dealt_to_many_ranks_quickly(world_size):
    drawn = np.random.default_rng(0).lognormal(7.5, 1.0, 8192).clip(64, 8192)
    lengths = [int(n) for n in drawn]
    budget = Budget(dp=world_size, tokens=16384, hidden_size=8192)
    start = time.process_time()
    shares = assign(lengths, range(len(lengths)), budget)
    number = max(count_micro_batches(lengths, share, budget) for share in shares)
    mine = micro_batches(lengths, shares[world_size - 1], budget, number)
    assert time.process_time() - start < 3.0
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    assert sorted(i for part in mine for i in part) == sorted(shares[world_size - 1])
    loads = [sum(budget.cost(lengths[i]) for i in share) for share in shares]
    assert max(loads) < 1.1 * sum(loads) / world_size


@pytest.mark.parametrize(
    ("world_size", "limit_s"),
    [
        (64, 10.0),
        pytest.param(256, 40.0, marks=pytest.mark.full),
        pytest.param(1024, 160.0, marks=pytest.mark.full),
    ],
)
def test_the_reshard_of_72b_over_all_ranks_is_planned_at_the_bound_of_bytes(world_size, limit_s):
    dims = ParallelDims(world_size=world_size, ranks_per_node=8, fsdp_size=world_size, rollout_tp=8)
    start = time.process_time()
    plan = model_plan(QWEN2_5["Qwen2.5-72B"], dims, aligned=False)
    buckets = [plan.rank_bucket(index, 3) for index in range(len(plan.buckets))]
    assert time.process_time() - start < limit_s
    assert buckets
    of_nodes = [plan.internode_bytes()[members].sum() for members in plan.topology.by_node]
    assert of_nodes == plan.internode_lower_bound_bytes().tolist()
