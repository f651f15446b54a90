"""Run a function on several ranks of this machine: gloo ranks, or one on each GPU.

Ranks are forked from a server process that has imported once per test session what most of them
need; the pytest process itself is never forked. They have the environment that it had then.
"""

import multiprocessing
import pickle
import tempfile
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

from sharding.mesh import init_distributed


def fork_server() -> ForkServerContext:
    """Whose processes begin with the program's imports done."""
    multiprocessing.set_forkserver_preload(["tests.preloaded"])
    return multiprocessing.get_context("forkserver")


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60,
    device_type: str = "cpu",
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on every rank, and return their results by rank.

    ``fn`` must be importable (module-level); the default process group is initialised around it.
    A rank that raises ends the others, and its traceback is part of the error here.
    ``timeout_s`` bounds one collective. ``device_type`` "cuda": rank r has device r.
    """
    fork_server()
    with tempfile.TemporaryDirectory() as folder:
        start_processes(
            _rank,
            args=(world_size, fn, folder, timeout_s, device_type, args),
            nprocs=world_size,
            start_method="forkserver",
        )
        return [pickle.loads(Path(folder, f"{r}.pkl").read_bytes()) for r in range(world_size)]


def _rank(
    rank: int,
    world_size: int,
    fn: Callable[..., Any],
    folder: str,
    timeout_s: float,
    device_type: str,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    with init_distributed(
        torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu"),
        rank=rank,
        world_size=world_size,
        timeout_s=timeout_s,
        init_method=f"file://{folder}/rendezvous",
    ):
        result = fn(rank, world_size, *args)
    Path(folder, f"{rank}.pkl").write_bytes(pickle.dumps(result))
