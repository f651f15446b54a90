"""Jobs under torchrun in which one rank raises, hangs or is stopped: the whole table (--full)."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ppo.run.folder import read_status
from tests.test_resume import ROOT, wait_until
from tests.test_train import rows_of

HANG_TIMEOUT_S = 8
PHASES = (
    *("reshard", "gen", "reward", "old_log_prob", "ref", "values", "update_critic"),
    *("update_actor", "testing", "save_checkpoint"),
)
OPTIONS = (
    *("trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.test_freq=1"),
    f"trainer.hang_timeout_s={HANG_TIMEOUT_S}",
)
pytestmark = [pytest.mark.distributed, pytest.mark.full]


def start(
    run: Path, fault: str, *overrides: str, ranks: int = 2, config: str = "ppo_tiny.yaml"
) -> subprocess.Popen[str]:
    """A job whose rank commits the fault; see tests/faults.py."""
    torchrun = ("torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
    arguments = ("--config", config, f"trainer.default_local_dir={run}", *OPTIONS, *overrides)
    return subprocess.Popen(
        [
            *(sys.executable, "-m", *torchrun, f"--nproc_per_node={ranks}"),
            *("-m", "tests.faults", fault, *arguments),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


def failed(run: Path, job: subprocess.Popen[str]) -> tuple[str, str]:
    """Reason and console of a job that has failed; nothing of it is left."""
    _, said = job.communicate(timeout=150)
    status = read_status(run)
    assert job.returncode == 1 and status is not None and status["state"] == "failed", said
    left = subprocess.run(["pgrep", "-af", str(run)], capture_output=True, text=True)
    assert left.stdout == "", left.stdout
    return status["reason"], said


@pytest.mark.parametrize("number", range(len(PHASES)), ids=PHASES)
def test_an_error_of_one_of_four_ranks_is_the_reason_in_every_phase(tmp_path, number):
    phase, rank = PHASES[number], number % 4
    run = tmp_path / "run"
    job = start(run, f"{rank}:{phase}:1:raise", "trainer.val_before_train=false", ranks=4)
    wait_until(lambda: "ERROR" in said_by(run, rank) or job.poll() is not None, 120)
    struck = time.monotonic()
    reason, said = failed(run, job)
    assert time.monotonic() - struck < 30
    where, _, what = reason.partition(": ")
    assert where.startswith(f"rank {rank} in ") and where.split("/")[-1].endswith(phase)
    assert what == "Injected: injected: out of memory"
    assert said.count(f"failed at step {read_status(run)['step']}: {reason}") == 1  # type: ignore[index]
    assert said.count("Root Cause") == 1 and "Connection closed" not in said


def said_by(run: Path, rank: int) -> str:
    """The log of a rank so far."""
    path = run / "logs" / f"rank_{rank:04d}.log"
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("act", ["stop", "hang"])
@pytest.mark.parametrize("number", range(len(PHASES)), ids=PHASES)
def test_a_rank_that_is_stopped_or_hangs_is_named_and_the_restart_resumes(tmp_path, number, act):
    phase, rank = PHASES[number], number % 2
    run = tmp_path / "run"
    job = start(run, f"{rank}:{phase}:1:{act}")
    wait_until(lambda: (run / "logs").exists(), 60)
    reason, said = failed(run, job)
    assert f"rank {rank} (process " in reason or "all ranks stand at the same point" in reason
    assert phase in reason and said.count(f": {reason}") == 2  # ours, and torchrun's report
    assert "in main\n" in said_by(run, rank)
    again = start(run, "9:none:1:raise")
    _, said = again.communicate(timeout=150)
    assert again.returncode == 0, said
    assert [row["step"] for row in rows_of(run)] == [0, 1, 2, 3]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_out_of_memory_between_two_collectives_ends_the_job_and_the_restart_is_smaller(
    tmp_path, ranks
):
    run, configured = tmp_path / "run", tmp_path / "configured"
    shared = ("trainer.val_before_train=false", "trainer.test_freq=-1")
    shared += ("actor.log_prob_max_token_len_per_gpu=256", "critic.ppo_max_token_len_per_gpu=256")
    job = start(run, "1:update_actor:2:oom", *shared, ranks=ranks)
    wait_until(lambda: (run / "oom.json").exists() or job.poll() is not None, 120)
    struck = time.monotonic()
    reason, _ = failed(run, job)
    assert time.monotonic() - struck < 30
    assert reason.startswith("rank 1 in step/update_actor: OutOfMemoryError: CUDA out of memory")
    left = json.loads((run / "oom.json").read_text())
    assert (left["rank"], left["phase"], left["budget"]) == (1, "update_actor", 128)
    assert 0 < left["tokens"] <= 128
    for folder, more in ((run, ()), (configured, ("actor.ppo_max_token_len_per_gpu=64",))):
        again = start(folder, "9:none:1:raise", *shared, *more, ranks=ranks)
        _, said = again.communicate(timeout=150)
        assert again.returncode == 0, said
        smaller = "actor.ppo_max_token_len_per_gpu is 64 instead of 128"
        assert said.count(smaller) == (folder == run)
    assert numbers_of(run) == numbers_of(configured) and len(numbers_of(run)) == 3


def numbers_of(run: Path) -> list[dict[str, object]]:
    """The rows without what depends on the clock."""
    left = ("timing", "perf/", "memory", "rollout/", "reshard", "guard/")
    return [{k: v for k, v in row.items() if not k.startswith(left)} for row in rows_of(run)]


@pytest.mark.sglang
def test_an_engine_whose_process_is_stopped_is_named_and_ended(tmp_path):
    run = tmp_path / "run"
    engine = ("rollout.engine=sglang", "rollout.engine_process=host", "trainer.hang_timeout_s=20")
    engine += ("trainer.total_training_steps=50",)
    job = start(run, "9:none:1:raise", *engine, ranks=1)
    log = run / "logs" / "engine_0000.log"
    wait_until(lambda: len(rows_of(run)) > 0 if (run / "metrics.jsonl").exists() else False, 300)
    [rank] = children_with(job.pid, "tests.faults")
    [host] = children_with(rank, "sglang/host.py")
    os.kill(host, signal.SIGSTOP)
    stopped = time.monotonic()
    reason, _ = failed(run, job)
    assert time.monotonic() - stopped < 50
    assert "the SGLang engine made no progress for 18 s in" in reason
    assert log.exists() and not Path(f"/proc/{host}").exists()


@pytest.mark.sglang
def test_an_engine_that_hangs_in_its_rank_is_named_and_the_run_ends(tmp_path):
    run = tmp_path / "run"
    engine = ("rollout.engine=sglang", "rollout.engine_process=rank", "trainer.hang_timeout_s=20")
    job = start(run, "1:gen:5:hang", *engine, "trainer.val_before_train=false", ranks=2)
    reason, _ = failed(run, job)
    assert reason.startswith("rank 1: the SGLang engine made no progress for 18 s in generate")
    assert "run_event_loop" in (run / "logs" / "engine_0001.log").read_text()


def children_with(pid: int, text: str) -> list[int]:
    """Children of a process whose command line has the text."""
    found = subprocess.run(["pgrep", "-P", str(pid), "-f", text], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]
