"""Threads and cores of a rank, on made-up machines and on this one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ppo.config import load_config
from ppo.run.machine import (
    EXCLUSIVE_PROCESS,
    compute_mode,
    exclusive_problem,
    given_threads,
    num_cores,
    numa_cpus,
    use_cores,
)

GPU = "0000:17:00.0"
# as torchrun does where nothing is set
AGENT = (
    "import os, sys; os.environ['OMP_NUM_THREADS'] = '1'; print('up', flush=True); sys.stdin.read()"
)


@pytest.fixture
def here() -> Iterator[set[int]]:
    """CPUs of this test, which it has again afterwards, as threads."""
    mine, threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield mine
    os.sched_setaffinity(0, mine)
    torch.set_num_threads(threads)


def machine(root: Path, *, siblings: dict[int, str], nodes: dict[int, str], gpu_node: int) -> Path:
    for cpu, text in siblings.items():
        folder = root / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    for node, text in nodes.items():
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text + "\n")
    folder = root / f"bus/pci/devices/{GPU}"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{gpu_node}\n")
    return root


def test_a_core_that_runs_two_threads_is_one_core(tmp_path, here):
    pairs = {cpu: ",".join(map(str, sorted(here))) for cpu in here}
    assert num_cores(machine(tmp_path, siblings=pairs, nodes={}, gpu_node=0)) == 1
    assert num_cores(tmp_path / "nothing is shown") == len(here)


def test_a_containers_quota_limits_the_cores(tmp_path, here):
    (tmp_path / "fs/cgroup").mkdir(parents=True)
    for text, expected in (("100000 100000", 1), ("max 100000", len(here)), ("5000 100000", 1)):
        (tmp_path / "fs/cgroup/cpu.max").write_text(text)
        assert num_cores(tmp_path) == expected


def test_a_rank_is_bound_to_the_node_of_its_gpu_and_shares_the_cores(tmp_path, here):
    first = min(here)
    sys_ = machine(tmp_path, siblings={}, nodes={0: "200-299,300", 1: f"{first}"}, gpu_node=1)
    assert numa_cpus(GPU, sys_) == (1, {first})
    said = use_cores(local_ranks=1, given=None, bus_id=GPU, sys=sys_)
    assert os.sched_getaffinity(0) == {first} and torch.get_num_threads() == 1
    assert said == (
        f"1 CPU threads a rank ({len(here)} cores, 1 ranks on this node), "
        f"bound to NUMA node 1 of GPU {GPU} (1 CPUs)"
    )


@pytest.mark.parametrize("node", [-1, 0, 7])
def test_a_rank_stays_where_it_is_if_the_node_is_not_shown_or_not_allowed(tmp_path, here, node):
    sys_ = machine(tmp_path, siblings={}, nodes={0: "200-299"}, gpu_node=node)
    assert "not bound" in use_cores(local_ranks=2, given=None, bus_id=GPU, sys=sys_)
    assert os.sched_getaffinity(0) == here
    assert torch.get_num_threads() == max(1, len(here) // 2)


def test_what_the_user_asks_for_counts(here):
    assert (
        use_cores(local_ranks=8, given=3, bus_id=None) == "3 CPU threads a rank (OMP_NUM_THREADS)"
    )
    assert torch.get_num_threads() == 3


def test_the_1_of_torchrun_is_told_from_the_1_of_a_user():
    def answer(**variables: str) -> int | None:
        env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        command, pipe = [sys.executable, "-c", AGENT], subprocess.PIPE
        with subprocess.Popen(command, env=env | variables, stdin=pipe, stdout=pipe) as agent:
            assert agent.stdout is not None and agent.stdout.readline() == b"up\n"
            return given_threads({"OMP_NUM_THREADS": "1"}, agent.pid)

    assert answer() is None
    assert answer(OMP_NUM_THREADS="1") == 1
    assert given_threads({"OMP_NUM_THREADS": "4"}, 1) == 4
    assert given_threads({"OMP_NUM_THREADS": "1"}, None) == 1  # without an agent, the user's
    assert given_threads({}, None) is None
    assert given_threads({"OMP_NUM_THREADS": "many"}, None) is None


def test_a_gpu_that_takes_one_process_is_refused_where_the_engine_is_another():
    sglang, embedded, in_rank = (
        load_config(None, ["model.path=tiny", "data.train_files=tiny", *keys]).rollout
        for keys in (
            ["rollout.engine=sglang"],
            ["rollout.engine=torch"],
            ["rollout.engine=sglang", "rollout.engine_process=rank"],
        )
    )
    problem = exclusive_problem(EXCLUSIVE_PROCESS, sglang)
    assert problem is not None and "nvidia-smi -c DEFAULT" in problem.fix
    assert exclusive_problem(EXCLUSIVE_PROCESS, embedded) is None
    assert exclusive_problem(EXCLUSIVE_PROCESS, in_rank) is None
    assert exclusive_problem(0, sglang) is None
    assert compute_mode(torch.device("cpu")) == 0
