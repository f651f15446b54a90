"""The process groups and device meshes of a run.

Owns their construction from `ParallelDims` and their names. Must not know models, nor what is sent
over a group. All groups are made in `build_mesh`, by all ranks in the same order.
"""

import logging
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import (
    HashStore,  # pyright: ignore[reportPrivateImportUsage]
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroup,
    Store,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from sharding.dims import ParallelDims

__all__ = ["Mesh", "MeshError", "ParallelDims", "build_mesh", "init_distributed"]

logger = logging.getLogger(__name__)


class MeshError(ValueError):
    """Degrees that do not fit the world; the message lists the possible ones."""


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands, and the groups it talks over.

    Device groups use NCCL for CUDA tensors and gloo for CPU tensors. Groups with the same ranks in
    the same order are one group, so that NCCL holds one communicator for them; only sp has its own,
    since what goes over one communicator waits for each other on any stream, and the exchange of
    one layer's heads must not wait until the next layer is gathered.
    """

    dims: ParallelDims
    rank: int
    device: torch.device
    fsdp: DeviceMesh
    """what fully_shard takes: ("fsdp",), or ("dp_replicate", "fsdp") with several replicas"""
    host_group: ProcessGroup
    """all ranks, host tensors only, its own timeout: waiting and small decisions"""
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


@contextmanager
def init_distributed(
    device: torch.device,
    *,
    rank: int = 0,
    world_size: int = 1,
    timeout_s: float = 600,
    init_method: str | None = None,
) -> Iterator[None]:
    """The default process group, for as long as the block runs.

    Args:
        device: this rank's device; on CUDA it becomes the current one.
        rank, world_size: from torchrun; without it a world of one, which needs no port.
        timeout_s: seconds after which a collective fails.
        init_method: rendezvous of several ranks; None = torchrun's environment.
    """
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    if world_size == 1 and init_method is None:
        store: Store = HashStore()
    else:
        store = next(rendezvous(init_method or "env://", rank, world_size, timeout=timeout))[0]
        if init_method is None:
            store = _unused_store(store, rank, world_size, timeout)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        if succeeded or not cuda:  # NCCL waits here for ranks that will not come after a failure
            dist.destroy_process_group()


def _unused_store(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """The part of a store that no earlier attempt has written to.

    torchrun (torch 2.14) keeps one store over its restarts, where the addresses of dead ranks
    would be found. Rank 0 makes up a name and gives it to whoever asks with a question of their
    own; questions of dead ranks are answered too, and nobody listens.
    """
    store = PrefixStore("attempts", store)
    store.set_timeout(timeout)
    if rank == 0:
        name, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
        while store.add(f"{name}/told", 0) < world_size - 1:
            if time.monotonic() > deadline:
                raise RuntimeError(f"not all of {world_size} ranks have come within {timeout}")
            if store.queue_len("questions"):
                store.set(store.queue_pop("questions").decode(), name)
            else:
                time.sleep(0.01)
    else:
        question = uuid.uuid4().hex
        store.queue_push("questions", question)
        name = store.get(question).decode()
        store.add(f"{name}/told", 1)
    return PrefixStore(name, store)


def build_mesh(dims: ParallelDims, device: torch.device, *, host_timeout_s: float = 1800) -> Mesh:
    """Make all groups and meshes. Collective over all ranks.

    Args:
        dims: degrees; -1 is resolved.
        device: this rank's device.
        host_timeout_s: seconds that one rank may be ahead of another on the host groups.

    Raises:
        MeshError: the degrees do not fit the running world, with the possible ones.
    """
    dims = dims.resolve()
    problems = dims.problems()
    if dims.world_size != dist.get_world_size():
        problems.insert(
            0, f"world_size {dims.world_size}: there are {dist.get_world_size()} running ranks"
        )
    if problems:
        raise MeshError("\n".join(problems))
    groups = _Groups(timedelta(seconds=host_timeout_s))
    host = groups.mine([list(range(dims.world_size))], host=True)
    shard = groups.mine(dims.shard_rows())
    replicate = groups.mine(dims.replicate_rows())
    rollout = groups.mine(dims.rollout_rows())
    mesh = Mesh(
        dims=dims,
        rank=dist.get_rank(),
        device=device,
        fsdp=_fsdp_mesh(dims, shard, replicate, device),
        host_group=host,
        shard_group=shard,
        replicate_group=replicate,
        sp_group=groups.mine(dims.sp_rows(), shared=dims.sp == 1),
        rollout_group=rollout,
        rollout_host_group=groups.mine(dims.rollout_rows(), host=True),
        rollout=DeviceMesh.from_group(rollout, device.type, mesh_dim_names=("rollout_tp",)),
    )
    logger.info(
        "%d ranks on %d nodes: dp_replicate %d x dp_shard %d x sp %d (%s), rollout_dp %d x tp %d",
        dims.world_size,
        dims.nodes,
        dims.dp_replicate,
        dims.dp_shard,
        dims.sp,
        dims.strategy,
        dims.rollout_dp,
        dims.rollout_tp,
    )
    return mesh


class _Groups:
    """Makes groups by their ranks, each once."""

    def __init__(self, host_timeout: timedelta):
        self._host_timeout = host_timeout
        self._made: dict[tuple[bool, tuple[int, ...]], ProcessGroup] = {}

    def mine(
        self, rows: Sequence[Sequence[int]], *, host: bool = False, shared: bool = True
    ) -> ProcessGroup:
        """Make a group of every row, and return the one that this rank is in.

        All ranks make all rows. The order inside a row is kept: a plain DeviceMesh of permuted
        ranks would sort its group, and its coordinates would lie.
        """
        made = self._made if shared else {}
        for row in rows:
            key = (host, tuple(row))
            if key not in made:
                timeout = self._host_timeout if host else None
                made[key] = new_group(row, host=host, timeout=timeout)
        row = next(row for row in rows if dist.get_rank() in row)
        return made[host, tuple(row)]


def new_group(
    ranks: Sequence[int], *, host: bool = False, timeout: timedelta | None = None
) -> ProcessGroup:
    """A group in the order given. Collective over all ranks, members or not.

    host: for host tensors only. timeout: None = that of the default group; torch would take
    30 minutes instead, whatever `init_distributed` was told.
    """
    if timeout is None:
        default = dist.distributed_c10d._get_default_group()
        timeout = default._get_backend(torch.device("cpu")).options._timeout
    backend = "gloo" if host else None
    group = dist.new_group(list(ranks), backend=backend, timeout=timeout, sort_ranks=False)
    return cast(ProcessGroup, group)


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
