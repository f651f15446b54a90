"""Ranks that fail, hang or are stopped: the others end too, soon, and the cause is written down."""

import json
import re
import time
from collections.abc import Generator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException

from ppo.config import load_config
from ppo.metrics import Metrics
from ppo.rollout.collector import Collector
from ppo.run import watchdog
from ppo.run.folder import read_status
from ppo.run.run import Run
from sharding.agree import gather
from sharding.mesh import build_mesh
from sharding.progress import PROGRESS
from tests.distributed import run_distributed
from tests.faults import Injected, arm
from tests.test_train import train_here


def train(rank: int, world_size: int, folder: str, fault: str, *overrides: str) -> None:
    """A run in which one rank commits a fault; a rank that is not ended says so."""
    watchdog.GRACE_S = 1.0
    arm(fault, rank)
    train_here(rank, world_size, [(folder, overrides)])


def reason_of(folder: Path, entry: Any, world_size: int, *args: Any) -> str:
    """Why the run failed, as status.json has it. All ranks have ended then."""
    with pytest.raises(ProcessException):
        run_distributed(entry, world_size, str(folder), *args)
    status = read_status(folder)
    assert status is not None and status["state"] == "failed", status
    return status["reason"]


@pytest.mark.distributed
def test_an_error_of_one_rank_in_a_step_with_collectives_ends_all_with_its_text(tmp_path):
    """The others are in the exchange of the weights, and come to no poll."""
    folder = tmp_path / "run"
    reason = reason_of(folder, train, 4, "2:reshard:2:raise")
    assert time.time() - (folder / "status.json").stat().st_mtime < 30  # since it was written
    assert reason == "rank 2 in step/gen/reshard: Injected: injected: out of memory"
    logs = [(folder / f"logs/rank_000{rank}.log").read_text() for rank in range(4)]
    assert [log.count("ERROR") for log in logs] == [0, 0, 1, 0]
    assert "Traceback" in logs[2]


@pytest.mark.distributed
def test_a_rank_that_is_stopped_is_named_and_killed_with_its_stack_in_its_log(tmp_path):
    folder = tmp_path / "run"
    options = ("trainer.hang_timeout_s=3", "trainer.comm_timeout_s=60")
    reason = reason_of(folder, train, 2, "1:update_actor:2:stop", *options)
    assert re.match(r"no sign of life for [23] s from rank 1 \(process \d+ on ", reason)
    assert reason.endswith("; the others are in step/update_actor")
    logs = [(folder / f"logs/rank_000{rank}.log").read_text() for rank in range(2)]
    assert all("in update_actor\n" in log for log in logs)


class Meeting:
    """An engine whose release is collective, as that of an engine with processes of its own."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def start(self) -> Generator[None, None, None]:
        yield

    def wake(self, loaded: Any) -> Generator[None, None, dict[str, float]]:
        loaded()
        yield
        return {}

    def release(self) -> None:
        dist.barrier(group=self.mesh.host_group)


def fail_or_hang(rank: int, world_size: int, folder: str, fault: str) -> None:
    """A generation that rank 1 fails in, or hangs in, while rank 0 is in a collective of it."""
    watchdog.GRACE_S = 1.0
    options = [f"trainer.default_local_dir={folder}", "trainer.hang_timeout_s=2"]
    config = load_config("ppo_tiny.yaml", options)
    mesh = build_mesh(config.dims(world_size, world_size), torch.device("cpu"))
    parts: dict[str, Any] = {
        "actor": SimpleNamespace(on_device=nullcontext),
        "engine": Meeting(mesh),
        "tokenizer": None,
        "stop_token_ids": (),
    }
    with Run(config, mesh, command=[]) as run:
        run.begin(step=7)
        collector = Collector(config=config, run=run, **parts)
        with PROGRESS.during("gen"), collector.awake(Metrics()):
            for _ in range(2):
                PROGRESS.arrive()
                gather(rank, mesh.host_group)
                if rank == 1 and fault == "raise":
                    raise Injected("no room for the batch")
                if rank == 1:
                    time.sleep(60)


@pytest.mark.distributed
def test_an_error_of_one_rank_while_the_engine_is_awake_ends_all_with_its_text(tmp_path):
    reason = reason_of(tmp_path / "run", fail_or_hang, 2, "raise")
    assert reason == "rank 1 in gen: Injected: no room for the batch"


@pytest.mark.distributed
def test_a_rank_that_the_others_wait_for_is_named(tmp_path):
    """It lives, and its threads run: it only does nothing."""
    reason = reason_of(tmp_path / "run", fail_or_hang, 2, "hang")
    assert reason.startswith("nothing has moved for 2 s: the others wait for rank 1 (process ")
    assert json.loads((tmp_path / "run" / "status.json").read_text())["step"] == 7
    assert "in fail_or_hang\n" in (tmp_path / "run/logs/rank_0001.log").read_text()
