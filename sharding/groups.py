"""Process groups: the one that all ranks share, and those that are made of it.

Owns their backends, their time limits and what they cost in sockets. Must not know meshes, nor what
is sent over a group.

Host tensors go over gloo, device tensors over the device's own backend (NCCL, on a CPU gloo). The
default group is for the host: all of the waiting and the small messages. With TORCH_GLOO_LAZY_INIT
gloo connects two ranks when they first talk, which leaves a rank a few connections instead of one
to every other rank of each group.
"""

import errno
import inspect
import logging
import os
import re
import resource
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import (
    HashStore,  # pyright: ignore[reportPrivateImportUsage]
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroup,
    Store,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.rendezvous import rendezvous

logger = logging.getLogger(__name__)

HOST = "gloo"
"""the backend of host tensors"""
LOOPBACK = re.compile(r"\[(?:::ffff:)?(127\.[0-9.]+|::1)\]:\d")
"""an address as gloo writes it, which means whatever machine asks"""
MOST_FILES = 1 << 20
"""open files that a process asks for; some programs count up to their limit"""


@contextmanager
def init_distributed(
    device: torch.device,
    *,
    rank: int = 0,
    world_size: int = 1,
    timeout_s: float = 600,
    start_timeout_s: float | None = None,
    init_method: str | None = None,
) -> Iterator[None]:
    """The default process group, for as long as the block runs.

    Args:
        device: this rank's device; on CUDA it becomes the current one.
        rank, world_size: from torchrun; without it a world of one, which needs no port.
        timeout_s: seconds that one rank may be ahead of another.
        start_timeout_s: seconds to wait until all ranks are there; None = timeout_s.
        init_method: rendezvous of several ranks; None = torchrun's environment.
    """
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    raise_file_limit()
    patience = timedelta(seconds=timeout_s if start_timeout_s is None else start_timeout_s)
    if world_size == 1 and init_method is None:
        store: Store = HashStore()
    else:
        store = next(rendezvous(init_method or "env://", rank, world_size, timeout=patience))[0]
        if init_method is None:
            store = _unused_store(store, rank, world_size, patience)
    with naming_cause():
        dist.init_process_group(
            HOST,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
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


def world() -> ProcessGroup:
    """All ranks, for host tensors."""
    return dist.distributed_c10d._get_default_group()


def new_group(
    ranks: Sequence[int], *, backend: str = HOST, timeout: timedelta | None = None
) -> ProcessGroup:
    """A group in the order given. Collective over all ranks, members or not.

    Args:
        timeout: of one collective; None = that of the default group, where torch would take 30
            minutes, whatever `init_distributed` was told.

    Raises RuntimeError where ranks are permuted and this torch can only sort them.
    """
    limit = timeout_of(world()) if timeout is None else timeout
    options: dict[str, Any] = {}
    if list(ranks) != sorted(ranks):
        if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
            raise RuntimeError(
                f"torch {torch.__version__} sorts the ranks of a group, and rollout_tp > 1 needs "
                "groups in another order: use torch 2.13 or later, or rollout_tp 1"
            )
        options["sort_ranks"] = False
    group = dist.new_group(list(ranks), backend=backend, timeout=limit, **options)
    return cast(ProcessGroup, group)


def timeout_of(group: ProcessGroup) -> timedelta:
    """How long a collective of a host group may take."""
    return group._get_backend(torch.device("cpu")).options._timeout


def backend_of(device: torch.device) -> str:
    """The backend of this device's tensors."""
    return "nccl" if device.type == "cuda" else HOST


def raise_file_limit() -> None:
    """Let this process open as many files (and sockets) as it may: shells often start at 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        logger.debug("open files of this process: up to %d, where %d were allowed", most, soft)


@contextmanager
def naming_cause() -> Iterator[None]:
    """An error of connecting says what may be its cause: open files, or an address of a machine
    that others cannot reach."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        causes = [*_file_limit(), *_loopback(str(error))]
        if not causes:
            raise
        raise RuntimeError("\n".join([str(error), *causes])) from error


def _file_limit() -> Iterator[str]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = num_files()
    if num_open is not None and num_open + 16 >= soft:
        yield (
            f"this process has {num_open} files and sockets open, of {soft} that it may have "
            "(RLIMIT_NOFILE): raise the hard limit, `ulimit -Hn` or the scheduler's setting"
        )


def _loopback(error: str) -> Iterator[str]:
    if "refused" in error and (found := LOOPBACK.search(error)):
        yield (
            f"{found[1]} is a machine's own address: if the ranks are on several machines, a host "
            "name means that one there; name the network interface between them, "
            "GLOO_SOCKET_IFNAME=eth0 (launch/README.md, Network)"
        )


def num_files() -> int | None:
    """Files and sockets that this process has open; None where even that cannot be looked up."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError as error:  # EMFILE itself
        return (
            resource.getrlimit(resource.RLIMIT_NOFILE)[0] if error.errno == errno.EMFILE else None
        )
