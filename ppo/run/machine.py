"""What a rank uses of its machine: threads, the cores of its GPU's NUMA node, the GPU alone or not.

Owns how that is found out and set, on Linux; elsewhere nothing is changed. Must not know what runs.
A child that is to run on all cores is told so by whoever starts it: it inherits ours.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from ppo.config import ENGINE_TRAITS, Problem, RolloutConfig

SYS = Path("/sys")
EXCLUSIVE_PROCESS = 3
"""CUDA's compute mode in which a GPU takes one process"""
_COMPUTE_MODE = 20  # CU_DEVICE_ATTRIBUTE_COMPUTE_MODE


def given_threads(env: Mapping[str, str], agent: int | None) -> int | None:
    """OMP_NUM_THREADS as the user has set it; None where nobody has.

    torchrun sets it to 1 for more than one rank where it is not set, in its own environment. What
    it was started with is in /proc: there only what the user has set is found.

    agent: process id of torchrun, None without one.
    """
    value = env.get("OMP_NUM_THREADS", "")
    if not value.isdecimal() or int(value) < 1:
        return None
    if agent is not None and value == "1":
        try:
            started_with = Path(f"/proc/{agent}/environ").read_bytes().split(b"\0")
        except OSError:  # then torchrun's default is more likely than a user's 1
            return None
        if not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in started_with):
            return None
    return int(value)


def num_cores(sys: Path = SYS) -> int:
    """Cores that this process may compute on: of its affinity, each once though it may run two
    threads, and no more than a container's quota."""
    cpus = _affinity()
    cores = set()
    for cpu in cpus:
        siblings = sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            cores.add(min(_cpu_list(siblings.read_text()) & cpus))
        except (OSError, ValueError):
            cores.add(cpu)
    return max(1, min(len(cores), _quota(sys) or len(cores)))


def _affinity() -> set[int]:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _quota(sys: Path) -> int | None:
    """Whole CPUs of a container's limit (cgroup v2); None without one."""
    with suppress(OSError, ValueError):
        quota, period = (sys / "fs/cgroup/cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    return None


def numa_cpus(bus_id: str, sys: Path = SYS) -> tuple[int, set[int]] | None:
    """The NUMA node of a PCI device and the CPUs there; None where the system does not show it."""
    try:
        node = int((sys / f"bus/pci/devices/{bus_id}/numa_node").read_text())
        if node < 0:
            return None
        return node, _cpu_list((sys / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        return None


def _cpu_list(text: str) -> set[int]:
    """The kernel's notation: 0-3,8."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def bus_id_of(device: torch.device) -> str:
    """PCI address of a CUDA device, as /sys spells it."""
    found = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def use_cores(*, local_ranks: int, given: int | None, bus_id: str | None, sys: Path = SYS) -> str:
    """Set the threads of this rank, and bind it to its GPU's NUMA node; says what was done.

    Args:
        local_ranks: ranks that share this machine's cores.
        given: threads that the user has asked for; None = an equal share of the cores.
        bus_id: of the GPU whose node it is bound to; None = leave it on all cores.
    """
    cores = num_cores(sys)
    threads, where = max(1, cores // local_ranks), ""
    found = None if bus_id is None else numa_cpus(bus_id, sys)
    near = found[1] & _affinity() if found else set()
    if found and near:
        os.sched_setaffinity(0, near)
        threads = min(threads, num_cores(sys))
        where = f", bound to NUMA node {found[0]} of GPU {bus_id} ({len(near)} CPUs)"
    elif bus_id is not None:
        where = f", not bound: the system does not show the NUMA node of GPU {bus_id}"
    why = f"{cores} cores, {local_ranks} ranks on this node"
    if given is not None:
        threads, why = given, "OMP_NUM_THREADS"
    torch.set_num_threads(threads)
    return f"{threads} CPU threads a rank ({why}){where}"


def compute_mode(device: torch.device) -> int:
    """CUDA's compute mode of a device; 0, the usual one, where it cannot be asked for."""
    mode = ctypes.c_int(0)
    if device.type != "cuda":
        return 0
    with suppress(OSError, AttributeError):
        cuda = ctypes.CDLL("libcuda.so.1")
        number = torch.cuda.current_device() if device.index is None else device.index
        if cuda.cuDeviceGetAttribute(ctypes.byref(mode), _COMPUTE_MODE, number) != 0:
            return 0
    return mode.value


def exclusive_problem(mode: int, rollout: RolloutConfig) -> Problem | None:
    """An engine with processes of its own cannot share a GPU that takes one process."""
    kind = rollout.engine_kind(cuda=True)
    in_rank = rollout.engine_process_kind(cuda=True) == "rank"
    if mode != EXCLUSIVE_PROCESS or in_rank or not ENGINE_TRAITS[kind].own_processes:
        return None
    return Problem(
        "rollout.engine",
        kind,
        "its worker and the trainer are two processes on one GPU, which is in compute mode "
        "EXCLUSIVE_PROCESS",
        "`nvidia-smi -c DEFAULT` (root), or use rollout.engine=torch",
    )
