"""Runs on two ranks: stopping, failing and finishing together, and what the folder holds after."""

import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ppo.config import Config, ConfigError, load_config
from ppo.errors import InputError
from ppo.run.folder import (
    add_log_handlers,
    git_revision,
    lock_folder,
    read_status,
    remove_log_handlers,
    set_aside,
    write_status,
)
from ppo.run.run import Run, StopRequested
from ppo.run.signals import descendants
from sharding.mesh import build_mesh, init_distributed
from tests.distributed import run_distributed


def config_of(folder: Path, *overrides: str) -> Config:
    required = ["model.path=tiny", "data.train_files=tiny", "trainer.device=cpu"]
    return load_config(None, [*required, f"trainer.default_local_dir={folder}", *overrides])


def open_run(folder: Path, world_size: int, *overrides: str, restart_count: int = 0) -> Run:
    config = config_of(folder, *overrides)
    mesh = build_mesh(config.dims(world_size, world_size), torch.device("cpu"))
    return Run(config, mesh, command=["train_ppo.py", "a b"], restart_count=restart_count)


def steps(
    number: int, seconds: float, ended: list[str] | None = None
) -> Generator[None, None, int]:
    try:
        for _ in range(number):
            time.sleep(seconds)
            yield
        return number
    finally:
        if ended is not None:
            ended.append("closed")


def broken(after: int) -> Generator[None, None, int]:
    yield from steps(after, 0.01)
    raise KeyError("no such token")


def outcome(action: Callable[[], Any]) -> str:
    """What an action did, as text that can be compared between ranks."""
    try:
        return f"returned {action()}"
    except (RuntimeError, StopRequested, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _together(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """All scenarios that need two ranks, in one world; returns what this rank saw of each."""
    seen: dict[str, Any] = {}

    with open_run(root / "finished", world_size) as run:
        seen["nothing to stop"] = run.should_stop()
        start = time.monotonic()
        seen["own result"] = run.drive(steps(0 if rank == 0 else 9, 0.1))
        seen["early finisher waited"] = time.monotonic() - start > 0.8
        seen["partly done"] = run.poll(done=rank == 0)
        seen["all done"] = run.poll(done=True)
        ended: list[str] = []
        work = broken(3) if rank == 1 else steps(100, 0.02, ended)
        seen["one raises"] = outcome(lambda: run.drive(work))
        seen["abandoned work"] = ended
        seen["both raise"] = outcome(lambda: run.poll(done=True, error="disk full"))
        bad = ValueError("reward.function: no such file") if rank == 1 else None
        seen["bad input"] = outcome(lambda: run.agree(bad))
        seen["good input"] = outcome(lambda: run.agree(None))
        run.status("running", 3)
    dist.barrier()
    seen["finished"] = read_status(root / "finished")

    with open_run(root / "signal", world_size) as run:
        run.status("running", 5)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        ended = []
        seen["signal"] = outcome(lambda: run.drive(steps(1000, 0.02, ended)))
        seen["stopped work"] = ended
        seen["still stopping"] = run.should_stop()
        run.raise_stop()  # swallowed by the run: the process ends well
    dist.barrier()
    seen["preempted"] = read_status(root / "signal")

    folder = root / "stop_file"
    folder.mkdir(exist_ok=True)
    (folder / "STOP").touch()
    dist.barrier()
    with open_run(folder, world_size) as run:
        seen["stale STOP"] = run.should_stop()
        dist.barrier()
        if rank == 0:
            (folder / "STOP").touch()
        seen["STOP file"] = outcome(lambda: run.drive(steps(1000, 0.02)))
    dist.barrier()
    seen["STOP status"] = read_status(folder)
    with open_run(folder, world_size, restart_count=1) as run:
        seen["STOP after a restart by torchrun"] = run.should_stop()

    with open_run(root / "wall_time", world_size, "trainer.max_wall_time=1") as run:
        seen["wall time"] = outcome(lambda: run.drive(steps(1000, 0.02)))

    try:
        with open_run(root / "failed", world_size) as run:
            run.status("running", 7)
            if rank == 1:
                raise MemoryError("out of memory")
            time.sleep(1)
            run.status("running", 8)  # written too late to hide the failure
            raise ConnectionError("peer has gone")  # what the others see, later
    except (MemoryError, ConnectionError):
        dist.barrier()
        seen["failed"] = read_status(root / "failed")
    seen["handlers restored"] = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return seen


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("runs")
    return root, run_distributed(_together, 2, root)


@pytest.mark.distributed
def test_every_rank_sees_the_same(both) -> None:
    _, (first, second) = both
    differing = {"early finisher waited", "own result", "abandoned work"}
    assert {k: v for k, v in first.items() if k not in differing} == {
        k: v for k, v in second.items() if k not in differing
    }


@pytest.mark.distributed
def test_a_rank_that_is_done_waits_for_the_others_and_each_gets_its_own_result(both) -> None:
    _, (seen, other) = both
    assert seen["early finisher waited"]
    assert (seen["own result"], other["own result"]) == (0, 9)
    assert not seen["partly done"] and seen["all done"]
    assert not seen["nothing to stop"]


@pytest.mark.distributed
def test_an_error_on_one_rank_becomes_the_same_error_on_all(both) -> None:
    _, (seen, _) = both
    assert seen["one raises"] == "RuntimeError: rank 1: KeyError: 'no such token'"
    assert seen["abandoned work"] == ["closed"]
    assert seen["both raise"] == "RuntimeError: ranks 0, 1: disk full"
    assert seen["bad input"] == (
        "ConfigError: configuration: 1 problem\n  reward.function: no such file"
    )
    assert seen["good input"] == "returned None"


@pytest.mark.distributed
def test_a_finished_run_says_so_and_keeps_its_record(both) -> None:
    root, (seen, _) = both
    assert seen["finished"] == {"state": "finished", "step": 3, "reason": ""}
    folder = root / "finished"
    assert load_config(folder / "config.yaml").run_dir == folder
    (start,) = map(json.loads, (folder / "starts.jsonl").read_text().splitlines())
    assert start["command"] == "train_ppo.py 'a b'"
    assert start["world_size"] == 2
    logs = [(folder / "logs" / f"rank_000{rank}.log").read_text() for rank in (0, 1)]
    assert "[rank 0] INFO ppo.run.run: done after step 3" in logs[0]
    assert "[rank 1]" in logs[1]


@pytest.mark.distributed
def test_a_signal_on_one_rank_stops_all_and_the_run_ends_well(both) -> None:
    _, (seen, _) = both
    assert seen["signal"] == "StopRequested: SIGUSR1"
    assert seen["stopped work"] == ["closed"]
    assert seen["still stopping"]
    assert seen["preempted"] == {"state": "preempted", "step": 5, "reason": "SIGUSR1"}
    assert seen["handlers restored"]


@pytest.mark.distributed
def test_a_stop_file_stops_the_run_but_an_old_one_does_not(both) -> None:
    _, (seen, _) = both
    assert not seen["stale STOP"]
    assert seen["STOP file"] == "StopRequested: STOP file"
    assert seen["STOP status"] == {"state": "preempted", "step": 0, "reason": "STOP file"}
    assert seen["STOP after a restart by torchrun"]


@pytest.mark.distributed
def test_the_wall_time_stops_the_run(both) -> None:
    _, (seen, _) = both
    assert seen["wall time"] == "StopRequested: trainer.max_wall_time"


@pytest.mark.distributed
def test_the_first_failure_is_the_reason(both) -> None:
    _, (seen, _) = both
    expected = {"state": "failed", "step": 7, "reason": "rank 1: MemoryError: out of memory"}
    assert seen["failed"] == expected


def test_resume_disable_holds_for_the_first_start_and_sets_old_checkpoints_aside(
    tmp_path: Path,
) -> None:
    (tmp_path / "checkpoints" / "step_00000005").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text("of an earlier run")
    with init_distributed(torch.device("cpu")):
        with open_run(tmp_path, 1, "trainer.resume_mode=disable") as run:
            assert run.resume_mode == "disable"
            assert not (tmp_path / "checkpoints").exists()
            assert (tmp_path / "checkpoints.old1" / "step_00000005").is_dir()
            assert "resume_mode: disable" in (tmp_path / "config.yaml").read_text()
        with open_run(tmp_path, 1, "trainer.resume_mode=disable", restart_count=1) as run:
            assert run.resume_mode == "disable"  # it ended before its first checkpoint
        (tmp_path / "checkpoints").mkdir()
        with open_run(tmp_path, 1, "trainer.resume_mode=disable", restart_count=1) as run:
            assert run.resume_mode == "auto"
            assert (tmp_path / "checkpoints").exists()


def test_a_resume_leaves_config_yaml_alone_until_the_change_is_accepted(tmp_path: Path) -> None:
    with init_distributed(torch.device("cpu")):
        with open_run(tmp_path, 1, "trainer.seed=1"):
            assert load_config(tmp_path / "config.yaml").trainer.seed == 1
        with open_run(tmp_path, 1, "trainer.seed=2") as run:
            assert load_config(tmp_path / "config.yaml").trainer.seed == 1
            run.save_config()
            assert load_config(tmp_path / "config.yaml").trainer.seed == 2


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    handlers = list(logging.getLogger().handlers)
    with (
        init_distributed(torch.device("cpu")),
        pytest.raises(ConfigError, match="run folder"),
        open_run(tmp_path / "file" / "run", 1),
    ):
        pass
    assert logging.getLogger().handlers == handlers


def test_a_folder_is_one_jobs_at_a_time_and_free_when_the_job_is_gone(tmp_path: Path) -> None:
    with lock_folder(tmp_path), pytest.raises(InputError) as error:
        lock_folder(tmp_path, patience_s=0)
    assert f"in use by process {os.getpid()} on {socket.gethostname()} since" in str(error.value)
    assert "trainer.experiment_name" in str(error.value)

    code = (
        "import sys, time; from pathlib import Path; from ppo.run.folder import lock_folder;"
        "held = lock_folder(Path(sys.argv[1])); print('locked', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "locked\n"
        with pytest.raises(InputError, match=f"process {other.pid} on"):
            lock_folder(tmp_path, patience_s=0)
        other.kill()
    lock_folder(tmp_path, patience_s=5).close()


def test_setting_aside_never_overwrites(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / str(number)).touch()
        set_aside(tmp_path / "checkpoints")
    set_aside(tmp_path / "checkpoints")  # nothing there
    assert (tmp_path / "checkpoints.old1" / "1").exists()
    assert (tmp_path / "checkpoints.old2" / "2").exists()


def test_a_warning_of_every_rank_is_on_the_console_once(tmp_path: Path, capfd) -> None:
    for rank in (0, 1):
        handlers = add_log_handlers(tmp_path, rank)
        logging.getLogger("ppo.test").warning("same", extra={"every_rank": True})
        logging.getLogger("ppo.test").warning("own %d", rank)
        remove_log_handlers(handlers)
    said = [line.split(" ", 2)[2] for line in capfd.readouterr().err.splitlines()]
    start = "WARNING ppo.test:"
    assert said == [f"[rank 0] {start} same", f"[rank 0] {start} own 0", f"[rank 1] {start} own 1"]
    assert "same" in (tmp_path / "logs" / "rank_0001.log").read_text()


def test_status_is_replaced_whole(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    write_status(tmp_path, "running", step=1, reason="")
    write_status(tmp_path, "failed", step=2, reason="no\nwords")
    assert read_status(tmp_path) == {"state": "failed", "step": 2, "reason": "no\nwords"}
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]


def test_the_revision_is_of_the_program_and_none_outside_of_git(tmp_path: Path) -> None:
    assert git_revision(tmp_path) is None


def _stuck_run(folder: Path) -> None:
    """A run whose main thread hangs in C, as in a collective whose partners are gone."""
    with init_distributed(torch.device("cpu")), open_run(folder, 1):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        mutex = ctypes.create_string_buffer(64)
        libc = ctypes.CDLL(None)
        libc.pthread_mutex_lock(mutex)
        print("stuck", flush=True)
        libc.pthread_mutex_lock(mutex)


def _waiting_run(folder: Path) -> None:
    """A run that is interrupted while Python can still run handlers."""
    with init_distributed(torch.device("cpu")), open_run(folder, 1) as run:
        run.status("running", 4)
        print("waiting", flush=True)
        run.drive(steps(10_000, 0.01))


@pytest.mark.parametrize(
    ("entry", "limit_s"), [("_waiting_run", 4), ("_stuck_run", 9)], ids=["waiting", "stuck in C"]
)
def test_ctrl_c_ends_a_run_and_its_children_within_ten_seconds(
    tmp_path: Path, entry: str, limit_s: float
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c",
         "import sys; from pathlib import Path; from tests.ppo.run import test_run;"
         f"test_run.{entry}(Path(sys.argv[1]))", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(1)  # the line says that the next call is the one to be hit
    children = descendants(process.pid)
    start = time.monotonic()
    for _ in range(2):  # the terminal's and torchrun's
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    assert process.wait(20) != 0
    assert time.monotonic() - start < limit_s
    status = read_status(tmp_path)
    assert status is not None and status["reason"] == "rank 0: interrupted (Ctrl-C)"
    assert len(children) == (entry == "_stuck_run")
    for child in children:
        assert not Path(f"/proc/{child}").exists() or _is_zombie(child)


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
