"""The collectives of the reshard and their byte counters.

Owns the process groups of both levels and what one collective of a plan is in torch.distributed.
Must not know parameters or engines.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from sharding.dims import ParallelDims
from sharding.mesh import Mesh
from sharding.reshard.geometry import Topology
from sharding.reshard.plan import MIB, Stage

# torch 2.14 has a new name for it and warns at the old one.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class ReshardStats:
    """Bytes of one run on this rank; received bytes are counted where the collectives start.

    ``internode_lower_bound_bytes`` is this rank's equal share of its node's bound.
    """

    lower_bound_bytes: int
    internode_lower_bound_bytes: float
    num_buckets: int
    received_bytes: int = 0
    internode_bytes: int = 0
    peak_extra_bytes: int = 0
    adapter_bytes: int = 0
    """received of adapters, which are merged into the shards before they are sent"""

    def metrics(self) -> dict[str, float]:
        """reshard/*, as every engine reports them."""
        adapters = {"reshard/adapters_mib": self.adapter_bytes / MIB} if self.adapter_bytes else {}
        return adapters | {
            "reshard/received_mib": self.received_bytes / MIB,
            "reshard/lower_bound_mib": self.lower_bound_bytes / MIB,
            "reshard/internode_mib": self.internode_bytes / MIB,
            "reshard/internode_lower_bound_mib": self.internode_lower_bound_bytes / MIB,
            "reshard/peak_extra_mib": self.peak_extra_bytes / MIB,
        }


class Link(NamedTuple):
    """A process group, this rank's position in it, and which members are on other nodes."""

    group: dist.ProcessGroup
    position: int
    away: tuple[bool, ...]

    def start(self, stage: Stage, out: Tensor, send: Tensor, stats: ReshardStats) -> dist.Work:
        """Start a collective from ``send`` into ``out``; counts what arrives from other ranks."""
        sizes = [
            0 if member == self.position else size * out.element_size()
            for member, size in enumerate(stage.receive_sizes)
        ]
        stats.received_bytes += sum(sizes)
        stats.internode_bytes += sum(s for s, away in zip(sizes, self.away, strict=True) if away)
        if stage.kind == "all_gather":
            work = all_gather_flat(out, send, group=self.group, async_op=True)
        else:
            work = dist.all_to_all_single(
                out,
                send,
                stage.receive_sizes,
                stage.send_sizes,
                group=self.group,
                async_op=True,
            )
        assert work is not None
        return work


def topology_of(row: Sequence[int], dims: ParallelDims) -> Topology:
    """The topology of one shard group, given as global ranks in shard-index order."""
    return Topology.of(row, tp=dims.rollout_tp, ranks_per_node=dims.ranks_per_node)


def make_links(mesh: Mesh) -> tuple[Link | None, Link]:
    """(across nodes or None, last exchange) of this rank. Collective over all ranks of the job."""
    cross: Link | None = None
    inner: Link | None = None
    for across, within in link_rows(mesh.dims):
        for ranks in across:
            cross = _new_link(ranks, mesh) or cross
        for ranks in within:
            inner = _new_link(ranks, mesh) or inner
    if inner is None:
        row = mesh.dims.shard_rows()[mesh.replicate_rank]
        inner = _link(mesh.shard_group, row, mesh)
    return cross, inner


def link_rows(dims: ParallelDims) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
    """Of each shard group that goes over two levels: the ranks of every group across nodes, and of
    every group inside one."""
    for row in dims.shard_rows():
        topology = topology_of(row, dims)
        if topology.two_level:
            places = zip(*topology.by_node, strict=True)
            yield (
                [[row[s] for s in place] for place in places],
                [[row[s] for s in members] for members in topology.by_node],
            )


def _new_link(ranks: Sequence[int], mesh: Mesh) -> Link | None:
    """A new group in the given order; None on ranks outside of it."""
    group = mesh.device_group(ranks)
    return _link(group, ranks, mesh) if mesh.rank in ranks else None


def _link(group: Any, ranks: Sequence[int], mesh: Mesh) -> Link:
    members = dist.get_process_group_ranks(group)
    assert members == list(ranks), f"group of {members} where the plan has {list(ranks)}"
    per_node = mesh.dims.ranks_per_node
    away = tuple(member // per_node != mesh.node_rank for member in ranks)
    return Link(group, members.index(mesh.rank), away)
