"""Faults at chosen places of a run: a rank that raises, hangs, or is stopped as by SIGSTOP.

    torchrun --nproc_per_node=2 -m tests.faults 1:update_actor:2:stop --config ppo_tiny.yaml ...

A fault is RANK:PHASE:TICK:ACT: at the TICK-th piece of work (sharding/progress.py) of the first
time that the rank is in that phase; 1 is its beginning. A restart by torchrun has none.
"""

import os
import signal
import sys
import time
from typing import Any

import torch

from sharding.progress import PROGRESS

ACTS = ("raise", "hang", "stop", "kill", "oom")


class Injected(MemoryError):
    """As if an allocation had failed."""


def arm(fault: str, rank: int) -> None:
    """Have this process commit the fault, if it is this rank's."""
    culprit, phase, at, act = fault.split(":")
    assert act in ACTS
    if int(culprit) != rank:
        return
    tick, seen = PROGRESS.tick, [0]

    def ticking() -> None:
        tick()
        if PROGRESS.phase.split("/")[-1] == phase:
            seen[0] += 1
            if seen[0] == int(at):
                commit(act)

    PROGRESS.tick = ticking


def commit(act: str) -> None:
    """Do what is wrong."""
    if act == "raise":
        raise Injected("injected: out of memory")
    if act == "oom":
        run_out_of_memory()
        return
    if act == "hang":
        time.sleep(3600)
    time.sleep(0.5)  # others have heard of the phase
    os.kill(os.getpid(), signal.SIGSTOP if act == "stop" else signal.SIGKILL)


def run_out_of_memory() -> None:
    """In the next backward pass, after the first of FSDP's collectives and before the second."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    reduce, seen = FSDPParamGroup.post_backward, [0]

    def failing(self: FSDPParamGroup, *unused: Any) -> None:
        seen[0] += 1
        if seen[0] == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Injected.")
        reduce(self, *unused)

    FSDPParamGroup.post_backward = failing


if __name__ == "__main__":
    import train_ppo

    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        arm(sys.argv[1], int(os.environ["RANK"]))
    sys.exit(train_ppo.main(sys.argv[2:]))
