"""Runs on two ranks: stopping, failing and finishing together, and what the folder holds after."""

import ctypes
import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ppo.config import Config, ConfigError, load_config
from ppo.errors import InputError, StopRequested
from ppo.run import signals
from ppo.run.folder import (
    Outcome,
    add_log_handlers,
    git_revision,
    lock_folder,
    read_status,
    remove_log_handlers,
    write_status,
)
from ppo.run.run import Run
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


def pass_over(run: Run, number: int, seconds: float, *, signal_at: int = -1) -> tuple[int, int]:
    """How many steps were taken, and how many exchanges among the ranks that took."""
    taken, exchanges, all_reduce = 0, [], dist.all_reduce

    def counted(*args: Any, **options: Any) -> Any:
        exchanges.append(args)
        return all_reduce(*args, **options)

    with pytest.MonkeyPatch.context() as patch, suppress(StopRequested):
        patch.setattr(dist, "all_reduce", counted)
        patch.setattr("ppo.run.run.POLL_S", 0.2)
        for step in run.polled(range(number)):
            if step == signal_at:
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(seconds)
            taken += 1
    return taken, len(exchanges)


def _together(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """All scenarios that need two ranks, in one world; returns what this rank saw of each."""
    seen: dict[str, Any] = {}

    with open_run(root / "finished", world_size) as run:
        run.begin()
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

    with open_run(root / "polled", world_size) as run:
        slow = 0.02 if rank == 1 else 0.001  # the slowest rank decides
        seen["pass of many steps"] = pass_over(run, 100, slow)
        seen["pass of long steps"] = pass_over(run, 4, 0.3)
        seen["pass of nothing"] = pass_over(run, 0, 0)
        seen["pass that is stopped"] = pass_over(run, 400, slow, signal_at=20 if rank == 1 else -1)
    dist.barrier()

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

    with open_run(root / "preempt_file", world_size) as run:
        if rank == 0:
            (root / "preempt_file" / "PREEMPT").touch()
        seen["PREEMPT file"] = outcome(lambda: run.drive(steps(1000, 0.02)))
    dist.barrier()
    seen["PREEMPT status"] = read_status(root / "preempt_file")

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
def test_a_pass_over_the_batch_polls_by_time_and_on_every_rank_before_the_same_steps(both) -> None:
    _, (seen, _) = both
    steps, polls = seen["pass of many steps"]
    assert steps == 100 and 10 <= polls <= 25  # about every 0.2 s of 2 s, more often at first
    steps, polls = seen["pass of long steps"]
    assert steps == 4 and polls >= 2
    assert seen["pass of nothing"] == (0, 0)
    steps, _ = seen["pass that is stopped"]
    assert 20 < steps < 60


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
    assert seen["STOP status"] == {"state": "stopped", "step": 0, "reason": "STOP file"}
    assert seen["PREEMPT status"] == {"state": "preempted", "step": 0, "reason": "PREEMPT file"}
    assert seen["STOP after a restart by torchrun"]


def test_a_stop_between_two_starts_ends_the_second_where_the_job_starts_again_by_itself(
    tmp_path: Path,
) -> None:
    ends: dict[Outcome, bool] = {"preempted": True, "running": True, "stopped": False}
    ends |= {"finished": False, "interrupted": False, "failed": False}
    with init_distributed(torch.device("cpu")):
        for state, stops in ends.items():
            folder = tmp_path / state
            folder.mkdir()
            write_status(folder, state, step=3, reason="")
            for name in ("STOP", "PREEMPT"):
                (folder / name).touch()
            with open_run(folder, 1) as run:
                run.begin(step=3)
                if run.should_stop():
                    run.raise_stop()
            found = read_status(folder)
            assert found is not None and found["state"] == ("stopped" if stops else "finished")
            assert [(folder / name).exists() for name in ("STOP", "PREEMPT")] == [stops, False]
            with open_run(folder, 1) as run:  # it has been obeyed
                assert not run.should_stop()


@pytest.mark.distributed
def test_the_wall_time_stops_the_run(both) -> None:
    _, (seen, _) = both
    assert seen["wall time"] == "StopRequested: trainer.max_wall_time"


@pytest.mark.distributed
def test_the_first_failure_is_the_reason(both) -> None:
    _, (seen, _) = both
    expected = {"state": "failed", "step": 7, "reason": "rank 1: MemoryError: out of memory"}
    assert seen["failed"] == expected


def record_of(folder: Path) -> dict[str, bytes]:
    """Every file of a run but logs and lock, which are of processes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = {str(path.relative_to(folder)): path for path in files}
    return {
        name: path.read_bytes()
        for name, path in names.items()
        if not name.startswith(("logs/", "lock", "validations/"))
    }


def leave_a_run(folder: Path, state: str = "finished") -> dict[str, bytes]:
    """What an earlier run has left."""
    for name in (
        *("checkpoints/step_00000003/manifest.json", "samples/train_00000003.jsonl"),
        *("tensorboard/events.1", "metrics.jsonl", "config.yaml", "starts.jsonl"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} of an earlier run")
    write_status(folder, state, step=3, reason="")  # pyright: ignore[reportArgumentType]
    return record_of(folder)


def test_what_is_set_aside_is_set_aside_whole(tmp_path: Path, caplog) -> None:
    earlier = leave_a_run(tmp_path)
    with init_distributed(torch.device("cpu")):
        with open_run(tmp_path, 1, "trainer.resume_mode=disable") as run:
            assert record_of(tmp_path) == earlier  # not before the start is accepted
            run.begin(anew=True)
            assert record_of(tmp_path / "old1") == earlier
            now = record_of(tmp_path)
            assert set(now) - {f"old1/{name}" for name in earlier} == {
                *("config.yaml", "starts.jsonl", "status.json"),
            }
            assert "resume_mode: disable" in now["config.yaml"].decode()
        assert f"is now in {tmp_path / 'old1'}" in caplog.text
        (tmp_path / "metrics.jsonl").write_text("{}\n")
        with open_run(tmp_path, 1, restart_count=1) as run:
            run.begin(anew=True)  # torchrun's restart before a first checkpoint: its own rows
            assert (tmp_path / "metrics.jsonl").exists()
        with open_run(tmp_path, 1) as run:
            run.begin(anew=True)
        assert (tmp_path / "old2" / "metrics.jsonl").exists()
    assert record_of(tmp_path / "old1") == earlier


@pytest.mark.parametrize("state", ["finished", "preempted", "stopped", "interrupted", "failed"])
def test_a_start_that_is_refused_leaves_the_record_of_a_run_as_it_is(tmp_path, state) -> None:
    earlier = leave_a_run(tmp_path, state)
    with init_distributed(torch.device("cpu")):
        for error in (InputError("changed key"), MemoryError()):
            with pytest.raises(type(error)), open_run(tmp_path, 1):
                raise error
    assert record_of(tmp_path) == earlier


def test_an_evaluation_is_done_after_no_step(tmp_path: Path, caplog) -> None:
    caplog.set_level("INFO")
    with init_distributed(torch.device("cpu")), open_run(tmp_path, 1) as run:
        run.begin()
    assert caplog.messages[-1] == "done"


def test_a_start_that_does_not_train_writes_into_a_folder_of_its_own(tmp_path: Path) -> None:
    earlier = leave_a_run(tmp_path)
    with init_distributed(torch.device("cpu")):
        for mode in ("auto", "disable"):
            overrides = ("trainer.val_only=true", f"trainer.resume_mode={mode}")
            with open_run(tmp_path, 1, *overrides) as run:
                run.begin(step=1, anew=True)
                (run.record / "metrics.jsonl").touch()
    assert record_of(tmp_path) == earlier
    for number in ("1", "2"):
        folder = tmp_path / "validations" / number
        assert read_status(folder) == {"state": "finished", "step": 1, "reason": ""}
        names = {"status.json", "config.yaml", "starts.jsonl", "metrics.jsonl"}
        assert set(record_of(folder)) == names


def test_a_start_with_nothing_left_to_do_says_finished_unless_it_stands_there(tmp_path) -> None:
    with init_distributed(torch.device("cpu")):
        earlier = leave_a_run(tmp_path)
        with open_run(tmp_path, 1) as run:
            run.nothing_left(1)  # it went on from an early checkpoint
        assert record_of(tmp_path) == earlier
        for state in ("failed", "preempted"):
            leave_a_run(tmp_path, state)
            with open_run(tmp_path, 1) as run:
                run.nothing_left(3)
            assert read_status(tmp_path) == {"state": "finished", "step": 3, "reason": ""}


def test_a_run_that_was_killed_is_said_to_have_failed_by_the_next_start(tmp_path, caplog) -> None:
    write_status(tmp_path, "running", step=7, reason="")
    with init_distributed(torch.device("cpu")):
        with pytest.raises(InputError), open_run(tmp_path, 1):
            raise InputError("changed key")
        status = read_status(tmp_path)
        assert status is not None and (status["state"], status["step"]) == ("failed", 7)
        assert "killed" in status["reason"] and "after step 7" in caplog.text
        with open_run(tmp_path, 1) as run:
            run.begin(step=6)
            assert read_status(tmp_path) == {"state": "running", "step": 6, "reason": ""}


def test_config_yaml_has_no_change_that_was_refused(tmp_path: Path) -> None:
    with init_distributed(torch.device("cpu")):
        with open_run(tmp_path, 1, "trainer.seed=1") as run:
            run.begin()
            assert load_config(tmp_path / "config.yaml").trainer.seed == 1
        with open_run(tmp_path, 1, "trainer.seed=2") as run:
            assert load_config(tmp_path / "config.yaml").trainer.seed == 1
            run.begin()
            assert load_config(tmp_path / "config.yaml").trainer.seed == 2


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_outcome_is_written_on_a_full_disk_too(tmp_path: Path, monkeypatch, caplog) -> None:
    """No new file gets a block; a block that is there can be written over."""
    with init_distributed(torch.device("cpu")):
        with open_run(tmp_path, 1) as run:
            run.begin()
            run.status("running", 5)
            monkeypatch.setattr(Path, "write_text", full_disk)
        assert read_status(tmp_path) == {"state": "finished", "step": 5, "reason": ""}
        monkeypatch.undo()
        with pytest.raises(KeyError, match="boom"), open_run(tmp_path, 1) as run:
            run.begin(step=5)
            monkeypatch.setattr(Path, "write_text", full_disk)
            raise KeyError("boom" * 600)
        status = read_status(tmp_path)
        assert status is not None and status["reason"].startswith("rank 0: KeyError: 'boomboom")
        monkeypatch.undo()
        with open_run(tmp_path, 1) as run:
            run.begin(step=5)
            monkeypatch.setattr(Path, "write_text", full_disk)
            monkeypatch.setattr(Path, "open", full_disk)
        assert "status.json does not say finished: [Errno 28]" in caplog.text
        monkeypatch.undo()
        monkeypatch.setattr(Path, "write_text", full_disk)
        with pytest.raises(ConfigError, match="No space left"), open_run(tmp_path / "new", 1):
            pass


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


def test_a_log_that_finds_no_room_leaves_the_console(tmp_path: Path, capfd) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_0000.log").symlink_to("/dev/full")
    handlers = add_log_handlers(tmp_path, 0)
    logging.getLogger("ppo.test").warning("said")
    remove_log_handlers(handlers)
    said = capfd.readouterr().err
    assert said.endswith("WARNING ppo.test: said\n") and "Traceback" not in said


def test_status_is_replaced_whole(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    write_status(tmp_path, "running", step=1, reason="")
    write_status(tmp_path, "failed", step=2, reason="no\nwords")
    assert read_status(tmp_path) == {"state": "failed", "step": 2, "reason": "no\nwords"}
    write_status(tmp_path, "stopped", step=3, reason="")  # shorter
    assert read_status(tmp_path) == {"state": "stopped", "step": 3, "reason": ""}
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]
    for content in ("", "[1]", "{}", '{"state": 1, "step": "x"}'):
        (tmp_path / "status.json").write_text(content)
        assert read_status(tmp_path) is None


def test_the_revision_is_of_the_program_and_none_outside_of_git(tmp_path: Path) -> None:
    assert git_revision(tmp_path) is None


def _stuck_run(folder: Path) -> None:
    """A run whose main thread hangs in C, as in a collective whose partners are gone."""
    signals.ECHO_S = 0.5
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
    sys.exit(run.exit_code)


def _start(entry: str, folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c",
         "import sys; from pathlib import Path; from tests.ppo.run import test_run;"
         f"test_run.{entry}(Path(sys.argv[1]))", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.5)  # the line says that the next call is the one to be hit
    return process


def test_ctrl_c_saves_and_a_second_one_ends_a_run_that_hangs_with_its_children(tmp_path) -> None:
    waiting, stuck = (_start(f"_{name}_run", tmp_path / name) for name in ("waiting", "stuck"))
    children = descendants(stuck.pid)
    assert len(children) == 1
    for _ in range(2):  # the terminal's and torchrun's: one Ctrl-C
        waiting.send_signal(signal.SIGINT)
        stuck.send_signal(signal.SIGINT)
        time.sleep(0.1)
    _, said = waiting.communicate(timeout=20)
    assert waiting.returncode in (130, -signal.SIGINT) and "Traceback" not in said
    assert said.count("a second one ends it at once") == 1
    status = {"state": "interrupted", "step": 4, "reason": "Ctrl-C"}
    assert read_status(tmp_path / "waiting") == status
    time.sleep(0.6)
    assert stuck.poll() is None
    stuck.send_signal(signal.SIGINT)
    _, said = stuck.communicate(timeout=20)
    assert stuck.returncode == 130 and "Traceback" not in said
    failed = {"state": "failed", "step": 0, "reason": "rank 0: interrupted (Ctrl-C), not saved"}
    assert read_status(tmp_path / "stuck") == failed
    for child in children:
        assert not Path(f"/proc/{child}").exists() or _is_zombie(child)


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
