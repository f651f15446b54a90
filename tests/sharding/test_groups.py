"""What process groups cost in sockets and open files, measured on eight ranks."""

import math
import os
import resource
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ppo.run.start import ENVIRONMENT
from sharding.agree import gather
from sharding.dims import ParallelDims
from sharding.groups import init_distributed, naming_cause, new_group, world
from sharding.mesh import build_mesh
from tests.distributed import run_distributed

CPU = torch.device("cpu")


def sockets() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:  # the folder itself, closed by now
            continue
    return found


def talk(group: dist.ProcessGroup) -> None:
    """What a run does on the host: polls, values of all ranks, small and large, and waiting."""
    dist.all_reduce(torch.ones(1), group=group)
    gather("x" * 10_000 if dist.get_rank(group) == 0 else None, group)
    dist.barrier(group=group)


def count(world_size: int) -> dict[str, int]:
    """Sockets of this rank by what has made them."""
    found, before = {}, 0

    store = dist.distributed_c10d._get_default_store()  # a file: it needs no socket

    def note(name: str) -> None:
        nonlocal before
        now = sockets()
        found[name], before = now - before, now
        store.add(name, 1)
        while store.add(name, 0) < world_size:  # nobody connects before all have counted
            time.sleep(0.01)

    talk(world())
    note("default group")
    parts = [1] * world_size  # as the rows of samples move, sharding/rows.py
    dist.all_to_all_single(torch.empty(world_size), torch.empty(world_size), parts, parts)
    note("default group, all to all")
    checkpoints = new_group(range(world_size))
    talk(checkpoints)
    note("group of checkpoints")
    collected = [""] * world_size if dist.get_rank() == 0 else None
    dist.gather_object("plan", collected, group=checkpoints)  # torch's planner of checkpoints
    note("planning of a checkpoint")
    per_node = min(4, world_size)
    build_mesh(ParallelDims(world_size=world_size, ranks_per_node=per_node, rollout_tp=2), CPU)
    note("meshes, not yet used")
    return found


def _measure(rank: int, world_size: int, folder: str) -> tuple[dict[int, dict[str, int]], str]:
    dist.destroy_process_group()
    os.environ |= ENVIRONMENT
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))  # as shells start with few
    found = {}
    for size in (2, 4, 8):
        if rank < size:
            method = f"file://{folder}/{size}"
            with init_distributed(CPU, rank=rank, world_size=size, init_method=method):
                found[size] = count(size)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 1 << 20), hard)
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    num_open = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open, num_open))
    try:
        with naming_cause():
            new_group([0])
    except RuntimeError as error:
        return found, str(error)
    return found, ""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[int, dict[str, int]], str]]:
    return run_distributed(_measure, 8, str(tmp_path_factory.mktemp("rendezvous")))


@pytest.mark.distributed
def test_a_host_group_takes_a_few_sockets_for_each_doubling_of_the_ranks(seen):
    for rank, (found, _) in enumerate(seen):
        for size, sockets in found.items():
            steps = round(math.log2(size))
            assert sockets["default group"] <= 2 * steps, (rank, size)
            both = sockets["default group"] + sockets["default group, all to all"]
            assert both <= size, (rank, size)
            assert sockets["group of checkpoints"] <= 2 * steps, (rank, size)
            assert sockets["planning of a checkpoint"] <= (size if rank == 0 else 1)
            assert sockets["meshes, not yet used"] <= 8, (rank, size)


@pytest.mark.distributed
def test_connecting_beyond_the_limit_of_open_files_names_it(seen):
    for _, message in seen:
        assert "Too many open files" in message
        assert "(RLIMIT_NOFILE): raise the hard limit" in message


def test_a_torch_that_sorts_the_ranks_of_a_group_is_refused_only_for_permuted_ones(monkeypatch):
    made = []

    def sorting(ranks: list[int], *, backend: str, timeout: timedelta) -> str:
        made.append(ranks)
        return "group"

    with init_distributed(CPU):
        monkeypatch.setattr(dist, "new_group", sorting)
        assert new_group([0, 2, 4]) == "group" and made == [[0, 2, 4]]
        with pytest.raises(RuntimeError, match="sorts the ranks of a group"):
            new_group([0, 2, 1, 3])
    assert len(made) == 1


@pytest.mark.parametrize(
    ("refused", "named"),
    [
        ("SO_ERROR: Connection refused, remote=[127.0.1.1]:43210", "127.0.1.1"),
        ("connect [::ffff:127.0.0.1]:3409: Connection refused", "127.0.0.1"),
        ("SO_ERROR: Connection refused, remote=[10.0.0.7]:43210", None),
    ],
)
def test_an_address_that_is_each_machines_own_is_named_with_what_to_set(
    refused: str, named: str | None
) -> None:
    with pytest.raises(RuntimeError) as raised, naming_cause():
        raise RuntimeError(refused)
    assert str(raised.value).startswith(refused)
    assert ("GLOO_SOCKET_IFNAME" in str(raised.value)) == (named is not None)
    assert named is None or f"\n{named} is a machine's own" in str(raised.value)
