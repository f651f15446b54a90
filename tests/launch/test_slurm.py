"""launch/slurm/ppo.sbatch on a real two-node Slurm, started and ended here.

Three jobs share one Slurm: an undisturbed run; one that is requeued and then runs into its time
limit, each in the middle of an iteration; one with a bad configuration. Needs the Debian packages
slurm-wlm and munge, and refuses where a Slurm is configured already unless CI=true.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch.local_slurm import LocalSlurm, is_configured, local_slurm, missing_programs

pytestmark = [pytest.mark.slurm, pytest.mark.distributed, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

# Scores by length, and holds a sample as long as there is a file `hold`: a phase to be hit in. The
# probe at the start, an empty answer, is not held.
REWARD = """
import time
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, folder):
    while solution_str and (Path(folder) / "hold").exists():
        time.sleep(0.1)
    return len(solution_str) % 7 / 7
"""


class Jobs:
    """Submits ppo.sbatch as a user would, and knows where each job's files are."""

    def __init__(self, slurm: LocalSlurm, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder

    def submit(self, name: str, *overrides: str) -> str:
        folder = self.folder / name
        folder.mkdir()
        (folder / "reward.py").write_text(REWARD)
        return self.slurm.run(
            *("sbatch", "--parsable", "--nodes=2", "--gpus-per-node=0", "--signal=B:USR1@15"),
            "--oversubscribe",  # two jobs share the nodes
            *(f"--chdir={ROOT}", f"--output={folder / 'job.out'}", "launch/slurm/ppo.sbatch"),
            *("ppo_tiny.yaml", f"trainer.total_training_steps={STEPS}", "trainer.device=cpu"),
            *(f"reward.function.path={folder / 'reward.py'}", "reward.timeout_s=300"),
            *(f"reward.function.kwargs.folder={folder}", "trainer.val_before_train=false"),
            *(
                "trainer.test_freq=-1",
                "trainer.logger=[console,jsonl]",
                "actor.fsdp.fsdp_size=2",
                *overrides,
            ),
            RUN_DIR=str(folder / "run"),
            PYTHON=sys.executable,
            OMP_NUM_THREADS="1",
        )

    def log(self, name: str) -> str:
        return (self.folder / name / "job.out").read_text()

    def status(self, name: str) -> dict[str, Any] | None:
        file = self.folder / name / "run" / "status.json"
        return json.loads(file.read_text()) if file.exists() else None

    def rows(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / name / "run" / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def starts(self, name: str) -> list[int]:
        """Ranks of each start of the job."""
        lines = (self.folder / name / "run" / "starts.jsonl").read_text().splitlines()
        return [json.loads(line)["world_size"] for line in lines]

    def wait_until(self, name: str, what: Callable[[], bool], timeout_s: float = 240) -> None:
        deadline = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < deadline, f"{self.status(name)}\n{self.log(name)}"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    if os.environ.get("CI") != "true":
        if is_configured():
            pytest.skip("a Slurm is configured on this machine")
        if missing := missing_programs():
            pytest.skip(f"needs apt-get install slurm-wlm munge: no {', '.join(missing)}")
    with local_slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield Jobs(slurm, tmp_path_factory.mktemp("jobs"))


def test_a_bad_config_ends_the_job_at_once_with_2_and_one_message(jobs: Jobs) -> None:
    job = jobs.submit("bad", "actor.optim.lrr=1")
    end = jobs.slurm.wait_for(job, *ENDS, timeout_s=60)
    assert (end["JobState"], end["ExitCode"]) == ("FAILED", "2:0"), jobs.log("bad")
    assert jobs.log("bad").count("actor.optim.lrr") == 1
    assert jobs.status("bad") is None


def test_a_job_on_two_nodes_stops_resumes_and_ends_as_if_undisturbed(jobs: Jobs) -> None:
    job = jobs.submit("disturbed")
    hold = jobs.folder / "disturbed" / "hold"
    jobs.wait_until("disturbed", lambda: len(jobs.rows("disturbed")) >= 1)
    hold.touch()
    jobs.slurm.run("scontrol", "requeue", job)
    undisturbed = jobs.submit("undisturbed")  # while the other one waits
    jobs.wait_until("disturbed", lambda: "resumed" in jobs.log("disturbed"))
    # Scoring is held again; its end is a minute ahead, and Slurm warns 15 to 45 s before.
    end_time = datetime.now() + timedelta(seconds=60)
    jobs.slurm.run("scontrol", "update", f"JobId={job}", f"EndTime={end_time:%Y-%m-%dT%H:%M:%S}")
    stopped = f"job {job}: preempted"
    jobs.wait_until("disturbed", lambda: jobs.log("disturbed").count(stopped) == 2)
    hold.unlink()
    for name, number, restarts in (("disturbed", job, 2), ("undisturbed", undisturbed, 0)):
        end = jobs.slurm.wait_for(number, *ENDS, timeout_s=180)
        assert end["JobState"] == "COMPLETED", jobs.log(name)
        assert int(end["Restarts"]) == restarts
        assert jobs.starts(name) == [2] * (restarts + 1)
        ended = {"state": "finished", "step": STEPS, "reason": ""}
        assert (jobs.status(name) or {}).items() >= ended.items()
        assert "mesh: 2 nodes x 1 rank" in jobs.log(name)

    log = jobs.log("disturbed")
    # a requeue signals the ranks and the batch script, which touches PREEMPT: one of them is first
    requeued, out_of_time = re.findall("stop requested by (.*)", log)
    assert requeued in ("SIGTERM", "PREEMPT file") and out_of_time == "PREEMPT file"
    assert [row["step"] for row in jobs.rows("disturbed")] == list(range(1, STEPS + 1))
    for name in ("actor/pg_loss", "critic/vf_loss", "actor/grad_norm"):
        ours, theirs = ([r[name] for r in jobs.rows(j)] for j in ("disturbed", "undisturbed"))
        assert ours == theirs, name
    first_weights, second_weights = (weights(jobs.folder / j) for j in ("disturbed", "undisturbed"))
    assert first_weights and first_weights.keys() == second_weights.keys()
    for name, tensor in first_weights.items():
        assert torch.equal(tensor, second_weights[name]), name


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint by name, whole."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    checkpoint = folder / "run" / "checkpoints" / f"step_{STEPS:08d}"
    (metadata,) = checkpoint.rglob(".metadata")
    dcp_to_torch_save(metadata.parent, folder / "whole.pt")
    return flat(torch.load(folder / "whole.pt", weights_only=False))


def flat(tree: Any, name: str = "") -> dict[str, torch.Tensor]:
    if isinstance(tree, dict):
        return {k: v for key, part in tree.items() for k, v in flat(part, f"{name}.{key}").items()}
    return {name: tree} if isinstance(tree, torch.Tensor) else {}
