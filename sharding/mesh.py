"""The process groups and device meshes of a run.

Owns their construction from `ParallelDims` and their names. Must not know models, nor what is sent
over a group. Groups are made in `build_mesh` (those of a reshard in sharding/reshard/exchange.py,
of checkpoints in sharding/checkpoint/checkpointer.py), by all ranks in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from sharding.dims import ParallelDims
from sharding.groups import (
    HOST,
    backend_of,
    init_distributed,
    naming_cause,
    new_group,
    timeout_of,
    world,
)

__all__ = ["Mesh", "MeshError", "ParallelDims", "build_mesh", "init_distributed"]


class MeshError(ValueError):
    """Degrees that do not fit the world; the message lists the possible ones."""


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands, and the groups it talks over.

    Host groups take host tensors only, device groups tensors of `device` only. There is no device
    group of all ranks, so that NCCL holds no communicator (and its memory) for that alone. Groups
    with the same ranks in the same order are one group for the same reason; only sp has its own,
    since what goes over one communicator waits for each other on any stream, and the exchange of
    one layer's heads must not wait until the next layer is gathered.
    """

    dims: ParallelDims
    rank: int
    device: torch.device
    fsdp: DeviceMesh
    """what fully_shard takes: ("fsdp",), or ("dp_replicate", "fsdp") with several replicas"""
    timeout: timedelta
    """how long one collective of a device group may take"""
    host_group: ProcessGroup
    """all ranks, host tensors only, the default group: waiting and small decisions"""
    dp_group: ProcessGroup
    """the ranks that hold every sample once, host tensors only; all ranks at sp = 1"""
    node_group: ProcessGroup
    """the ranks of this node, host tensors only"""
    shard_group: ProcessGroup
    """the F ranks of this replica in shard-index order"""
    replicate_group: ProcessGroup
    """the ranks that hold the same shard"""
    sp_group: ProcessGroup
    """the ranks that share this rank's sequences"""
    rollout_group: ProcessGroup
    """the T adjacent ranks of this generation replica"""
    rollout_host_group: ProcessGroup
    """the same ranks, host tensors only"""
    rollout: DeviceMesh
    """("rollout_tp",) over rollout_group"""

    @property
    def device_groups(self) -> tuple[ProcessGroup, ...]:
        """Reducing over these one after the other is reducing over all ranks, on the device."""
        replicas = (self.replicate_group,) if self.dims.dp_replicate > 1 else ()
        return (self.shard_group, *replicas)

    def device_group(self, ranks: Sequence[int]) -> ProcessGroup:
        """Another device group, in the order given. Collective over all ranks, members or not."""
        return new_group(ranks, backend=backend_of(self.device), timeout=self.timeout)

    @property
    def local_rank(self) -> int:
        """Rank inside the node."""
        return self.rank % self.dims.ranks_per_node

    @property
    def node_rank(self) -> int:
        return self.rank // self.dims.ranks_per_node

    @property
    def replicate_rank(self) -> int:
        """Index of this rank's replica."""
        return self.rank // self.dims.shard_size

    @property
    def shard_index(self) -> int:
        """Which of the F shards of every parameter this rank holds."""
        return self.dims.shard_rows()[self.replicate_rank].index(self.rank)

    @property
    def dp_rank(self) -> int:
        """Which share of the sequences this rank works on."""
        return self.rank // self.dims.sp

    @property
    def sp_rank(self) -> int:
        """Which slice of its sequences this rank works on."""
        return self.rank % self.dims.sp

    @property
    def rollout_tp_rank(self) -> int:
        return self.rank % self.dims.rollout_tp

    @property
    def rollout_dp_rank(self) -> int:
        """Index of this rank's generation replica."""
        return self.rank // self.dims.rollout_tp


def build_mesh(dims: ParallelDims, device: torch.device, *, timeout_s: float | None = None) -> Mesh:
    """Make all groups and meshes. Collective over all ranks.

    Args:
        dims: degrees; -1 is resolved.
        device: this rank's device.
        timeout_s: seconds that a collective of a device group may take; None = as on the host.

    Raises:
        MeshError: the degrees do not fit the running world, with the possible ones.
        RuntimeError: ranks cannot connect; a limit of open files is named where it is near.
    """
    dims = dims.resolve()
    problems = dims.problems()
    if dims.world_size != dist.get_world_size():
        problems.insert(
            0, f"world_size {dims.world_size}: there are {dist.get_world_size()} running ranks"
        )
    if problems:
        raise MeshError("\n".join(problems))
    timeout = timeout_of(world()) if timeout_s is None else timedelta(seconds=timeout_s)
    with naming_cause():
        mesh = _build(dims, device, timeout)
        # samples move between any two ranks: connected now, not in the middle of a step
        each = torch.zeros(dims.world_size)
        dist.all_to_all_single(torch.empty_like(each), each, group=mesh.host_group)
    return mesh


def _build(dims: ParallelDims, device: torch.device, timeout: timedelta) -> Mesh:
    groups = _Groups(backend_of(device), timeout)
    host = _Groups(HOST, timeout_of(world()))
    host.add(range(dims.world_size), world())
    shard = groups.mine(dims.shard_rows())
    replicate = groups.mine(dims.replicate_rows())
    rollout = groups.mine(dims.rollout_rows())
    return Mesh(
        dims=dims,
        rank=dist.get_rank(),
        device=device,
        fsdp=_fsdp_mesh(dims, shard, replicate, device),
        timeout=timeout,
        host_group=world(),
        dp_group=host.mine(dims.dp_rows()),
        node_group=host.mine(dims.node_rows()),
        shard_group=shard,
        replicate_group=replicate,
        sp_group=groups.mine(dims.sp_rows(), shared=dims.sp == 1),
        rollout_group=rollout,
        rollout_host_group=host.mine(dims.rollout_rows()),
        rollout=DeviceMesh.from_group(rollout, device.type, mesh_dim_names=("rollout_tp",)),
    )


class _Groups:
    """Makes groups by their ranks, each once."""

    def __init__(self, backend: str, timeout: timedelta):
        self._backend, self._timeout = backend, timeout
        self._made: dict[tuple[int, ...], ProcessGroup] = {}

    def add(self, ranks: Sequence[int], group: ProcessGroup) -> None:
        """A group that is there already."""
        self._made[tuple(ranks)] = group

    def mine(self, rows: Sequence[Sequence[int]], *, shared: bool = True) -> ProcessGroup:
        """Make a group of every row, and return the one that this rank is in.

        All ranks make all rows. The order inside a row is kept: a plain DeviceMesh of permuted
        ranks would sort its group, and its coordinates would lie.
        """
        made = self._made if shared else {}
        for row in rows:
            if tuple(row) not in made:
                made[tuple(row)] = new_group(row, backend=self._backend, timeout=self._timeout)
        return made[next(tuple(row) for row in rows if dist.get_rank() in row)]


def _fsdp_mesh(
    dims: ParallelDims, shard: ProcessGroup, replicate: ProcessGroup, device: torch.device
) -> DeviceMesh:
    """The mesh that fully_shard takes, over groups in shard-index order."""
    if dims.dp_replicate == 1:
        return DeviceMesh.from_group(shard, device.type, mesh_dim_names=("fsdp",))
    return DeviceMesh.from_group(
        [replicate, shard],
        device.type,
        mesh=torch.tensor(dims.shard_rows()),
        mesh_dim_names=("dp_replicate", "fsdp"),
    )
