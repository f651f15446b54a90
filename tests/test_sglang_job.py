"""Training with the real SGLang under torchrun, as a user starts it: two jobs at the same moment.

Each has one engine for both ranks. One is in processes of its own, and ends by the death of one of
these. The other is in the ranks, and has episodes of several turns; it ends by SIGTERM. Nothing is
exported for SGLang.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ppo.run.signals import descendants

pytestmark = [pytest.mark.sglang, pytest.mark.distributed, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[1]
START_S = 600  # for a machine that does other things too; 40 s when idle
FAULT_S = 30.0
STEPS = 2
"""the second with weights that were trained"""
ENDLESS = (
    *("trainer.total_epochs=1000", "trainer.total_training_steps=10000"),
    *("trainer.test_freq=0", "trainer.save_freq=0", "trainer.val_before_train=false"),
)

EPISODES = (
    f"rollout.episode.path={ROOT / 'tests' / 'an_episode.py'}",
    *("data.max_prompt_length=48", "data.max_response_length=80", "reward.max_failed_fraction=1"),
)
"""with tools that answer between the turns"""


class Job:
    """A torchrun that trains with SGLang until something ends it."""

    def __init__(
        self, folder: Path, *overrides: str, config: str = "ppo_tiny.yaml", ranks: int = 2
    ) -> None:
        self.folder = folder
        self.output = folder.with_suffix(".log").open("w+")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={ranks}", str(ROOT / "train_ppo.py"), "--config", config]
        command += ["rollout.engine=sglang", "rollout.dtype=float32", *ENDLESS, *overrides]
        command += [f"trainer.default_local_dir={folder}"]
        self.process = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT)
        self.children: list[int] = []

    def rows(self) -> list[dict[str, Any]]:
        """The complete steps in metrics.jsonl."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [row for row in map(json.loads, lines) if row["step"] > 0]

    def train(self, steps: int) -> list[dict[str, Any]]:
        """Wait for the first steps; remember the processes of the job."""
        deadline = time.monotonic() + START_S
        while len(self.rows()) < steps:
            assert self.process.poll() is None and time.monotonic() < deadline, self.text()
            time.sleep(0.5)
        self.children = descendants(self.process.pid)
        return self.rows()[:steps]

    def text(self) -> str:
        """What the job has printed."""
        self.output.flush()
        return Path(self.output.name).read_text()

    def pid_of(self, name: str) -> int:
        """A process of the job by its command line."""
        for pid in self.children:
            if name in Path(f"/proc/{pid}/cmdline").read_text():
                return pid
        raise AssertionError(f"no process {name} in {self.children}")

    def status(self) -> dict[str, Any]:
        """What the run says about its end."""
        return json.loads((self.folder / "status.json").read_text())

    def left(self) -> list[int]:
        """Processes that have outlived the job; they get a moment to end."""
        for _ in range(50):
            left = [pid for pid in self.children if _runs(pid)]
            if not left:
                break
            time.sleep(0.2)
        return left


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_two_jobs_started_together_train_agree_and_end_in_good_order(tmp_path: Path):
    shared = "rollout.tensor_model_parallel_size=2"
    host = Job(tmp_path / "host", shared, "rollout.engine_process=host")
    rank = Job(tmp_path / "rank", shared, *EPISODES)
    try:
        for row in rank.train(STEPS):
            check(row)
            assert 1 < row["episodes/turns"] <= 4
        names = [Path(f"/proc/{pid}/cmdline").read_text() for pid in rank.children]
        assert not [name for name in names if "sglang::" in name or "sglang/host.py" in name]
        rank.process.send_signal(signal.SIGTERM)
        rank.process.wait(FAULT_S)
        assert rank.status()["state"] == "preempted", rank.text()

        for row in host.train(STEPS):
            check(row)
        os.kill(host.pid_of("sglang::scheduler"), signal.SIGKILL)
        host.process.wait(FAULT_S)
        assert host.status()["state"] == "failed"
        assert "rank 0: the SGLang engine" in host.status()["reason"]
        assert "ended with exit code -9" in host.text()
        assert host.left() == rank.left() == []
    finally:
        for job in (host, rank):
            job.process.kill()
            job.process.wait()


def check(row: dict[str, Any]) -> None:
    """Trainer and engine compute the same, and nothing is sent that need not be."""
    assert 0 < row["training/rollout_probs_diff_max"] < 1e-4
    assert row["reshard/received_mib"] == row["reshard/lower_bound_mib"] > 0
    assert row["rollout/tokens_per_s"] > 0


@pytest.mark.full
@pytest.mark.parametrize("kind", ["rank", "host"])
@pytest.mark.parametrize(("ranks", "tp"), [(2, 1), (2, 2), (4, 2)])
def test_replicas_of_any_size_train_and_agree(tmp_path: Path, kind: str, ranks: int, tp: int):
    options = (f"rollout.engine_process={kind}", f"rollout.tensor_model_parallel_size={tp}")
    job = Job(tmp_path / "run", *options, ranks=ranks)
    try:
        for row in job.train(2):
            check(row)
        job.process.send_signal(signal.SIGTERM)
        job.process.wait(2 * FAULT_S)
        assert job.status()["state"] == "preempted" and job.left() == []
    finally:
        job.process.kill()
        job.process.wait()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["rank", "host"])
def test_a_real_model_trains_and_agrees(tmp_path: Path, kind: str):
    model = tmp_path / "smollm2"
    subprocess.run(
        [sys.executable, "-m", "ppo.models.smollm2", "--out", model], check=True, cwd=ROOT
    )
    job = Job(
        tmp_path / "run",
        f"model.path={model}",
        f"rollout.engine_process={kind}",
        *("data.train_files=tiny", "data.val_files=tiny"),
        *("data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "rollout.max_num_seqs=8"),
        "actor.fsdp.mixed_precision.param_dtype=float32",
        config="ppo_smollm2_cpu.yaml",
    )
    try:
        for row in job.train(2):
            assert 0 < row["training/rollout_probs_diff_max"] < 1e-4
        job.process.send_signal(signal.SIGTERM)
        job.process.wait(2 * FAULT_S)
        assert job.left() == []
    finally:
        job.process.kill()
        job.process.wait()
