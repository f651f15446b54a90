"""Nothing lost: runs that were stopped, killed or moved to other ranks end as if undisturbed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import train_ppo
from ppo.config import ConfigError
from ppo.rollout.collector import Collector
from ppo.rollout.scoring import Scorer
from sharding.checkpoint import export_hf
from sharding.checkpoint.folder import list_checkpoints
from tests.distributed import run_distributed
from tests.test_train import COMPARED as COMPARED_WITHOUT
from tests.test_train import rows_of, train_here

ROOT = Path(train_ppo.__file__).parent
STEPS = 5


# what keeps a state of its own from step to step
STATEFUL = (
    *("reward.normalize=true", "critic.normalize_returns=true", "data.mix={tiny: 2}"),
    *("data.difficulty.pool=0.5", "data.difficulty.visits=1"),
)
COMPARED = (*COMPARED_WITHOUT, "reward/running_std", "critic/returns/running_mean")


def until(step: int, *more: str) -> tuple[str, ...]:
    """Overrides for a run that ends after `step` and saves every second step."""
    return (f"trainer.total_training_steps={step}", "trainer.save_freq=2", *STATEFUL, *more)


def stop_once(
    owner: Any, name: str, folder: str, at: int, after: bool = False
) -> Callable[[], None]:
    """Touch STOP at the `at`-th call of owner.name, before or after it; returns the undoing."""
    original, calls = getattr(owner, name), [0]

    def touching(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == at and not after:
            (Path(folder) / "STOP").touch()
        result = original(*args, **kwargs)
        if calls[0] == at and after:
            (Path(folder) / "STOP").touch()
        return result

    setattr(owner, name, touching)
    return lambda: setattr(owner, name, original)


def stopped_and_resumed(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Two-rank runs: undisturbed; stopped in each kind of phase; looked at; with other settings."""
    base = Path(folder)
    [whole] = train_here(rank, world_size, [(str(base / "whole"), until(STEPS))])
    train_here(rank, world_size, [(str(base / "moved"), until(2))])
    states = []
    disturbed = str(base / "disturbed")
    for owner, name, at, after in (
        (Collector, "sample", 2, False),  # during the generation of step 2
        (Scorer, "score", 2, False),  # during the scoring of step 3 (2 is done first)
        (train_ppo, "update_actor", 1, True),  # in an update: it is finished
        (train_ppo, "save_checkpoint", 1, False),  # while a checkpoint is being written
        (Collector, "sample", 2, False),  # during the validation after step 5
    ):
        undo = stop_once(owner, name, disturbed, at, after)
        try:
            train_here(rank, world_size, [(disturbed, until(STEPS))])
        finally:
            undo()
        states.append(json.loads((Path(disturbed) / "status.json").read_text()))
        torch.distributed.barrier()
    train_here(rank, world_size, [(disturbed, until(STEPS))])
    record, refused = record_of(Path(disturbed)), ""
    torch.distributed.barrier()
    built, train_ppo.build_models = train_ppo.build_models, must_not_be_called
    try:
        train_here(rank, world_size, [(disturbed, until(STEPS, "actor.clip_ratio=0.3"))])
    except ConfigError as error:
        refused = str(error)
    early = (str(base / "early"), until(STEPS, *EARLY))
    train_ppo.build_models = built
    train_here(rank, world_size, [early])
    train_ppo.build_models = must_not_be_called
    train_here(rank, world_size, [(disturbed, until(STEPS)), early])  # nothing is left to train
    train_ppo.build_models = built
    step_4 = f"trainer.resume_mode={disturbed}/checkpoints/step_00000004"
    looking = [(disturbed, until(STEPS, "trainer.val_only=true", *more))
               for more in ((step_4, SETS), ("trainer.resume_mode=disable",))]  # fmt: skip
    train_here(rank, world_size, looking)
    unchanged = record_of(Path(disturbed)) == record
    if rank == 0:  # it goes on from the checkpoint of another run: this one is set aside
        shutil.copytree(base / "disturbed", base / "changed")
    torch.distributed.barrier()
    train_here(rank, world_size, [(str(base / "changed"), until(STEPS, step_4, *CHANGES))])
    return {"whole": whole["tokens"], "states": states, "refused": refused, "unchanged": unchanged}


SETS = "data.val_sets={more: {files: tiny, n: 4, temperature: 1.0, max_response_length: 3}}"
EARLY = (
    "trainer.early_stop.metric=-training/epoch",
    "trainer.early_stop.patience=1",
    "data.val_files=[]",
)
CHANGES = (
    *("trainer.allow_changed_config=true", "algorithm.kl_ctrl.kl_coef=0.5"),
    *("actor.optim.weight_decay=0.2", "actor.optim.betas=[0.8, 0.95]", "actor.optim.eps=1e-4"),
)


def must_not_be_called(*_: Any) -> None:
    raise AssertionError("models are built for a start that has nothing to do")


def record_of(run: Path) -> dict[str, int]:
    """Checksums of all files of a run, but of what is of processes and of looks at it."""
    files = {str(path.relative_to(run)): path for path in run.rglob("*") if path.is_file()}
    aside = ("logs/", "lock", "validations/")
    return {n: zlib.crc32(p.read_bytes()) for n, p in files.items() if not n.startswith(aside)}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two_ranks")
    yield folder, run_distributed(stopped_and_resumed, 2, str(folder), timeout_s=120)[0]


@pytest.mark.distributed
def test_a_run_that_was_stopped_in_every_phase_ends_bitwise_as_the_undisturbed_one(two_ranks):
    folder, seen = two_ranks
    whole, disturbed = rows_of(folder / "whole"), rows_of(folder / "disturbed")
    assert [row["step"] for row in disturbed] == list(range(1, STEPS + 1))
    for a, b in zip(whole, disturbed, strict=True):
        for name in COMPARED:
            assert a[name] == b[name], (a["step"], name)
    states = [(s["state"], s["step"]) for s in seen["states"]]
    assert states == [
        ("stopped", 1),
        ("stopped", 2),
        ("stopped", 3),
        ("stopped", 4),
        ("stopped", 5),
    ]
    log = (folder / "disturbed" / "logs" / "rank_0000.log").read_text()
    assert all(f"after step {n}" in log and "resumed from" in log for n in (1, 2, 3, 4, 5))
    validated = [
        {name: x for name, x in rows[-1].items() if name.startswith("val-")}
        for rows in (whole, disturbed)
    ]
    assert validated[0] == validated[1]  # repeated, in its row
    assert "val-core/tiny/reward/mean@1" in validated[0]
    state = json.loads(
        (folder / "disturbed/checkpoints/step_00000005/train_state.json").read_text()
    )
    assert state["state"]["validation_due"] is False


@pytest.mark.distributed
def test_a_run_whose_metric_does_not_improve_ends_as_finished_and_stays_so(two_ranks):
    run = two_ranks[0] / "early"
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"]) == ("finished", 2)
    assert status["reason"].startswith("trainer.early_stop: -training/epoch was 1 times not better")
    assert [row["step"] for row in rows_of(run)] == [1, 2]
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step_00000002"]


@pytest.mark.distributed
def test_a_changed_key_that_matters_is_refused_by_name(two_ranks):
    assert "actor.clip_ratio: 0.2 -> 0.3" in two_ranks[1]["refused"]
    assert "trainer.allow_changed_config" in two_ranks[1]["refused"]
    assert "trainer.experiment_name" in two_ranks[1]["refused"]


@pytest.mark.distributed
def test_starts_that_are_refused_or_only_look_change_nothing_of_a_run(two_ranks):
    folder, seen = two_ranks
    assert seen["unchanged"]
    for number, step in (("1", 4), ("2", 0)):
        look = folder / "disturbed" / "validations" / number
        assert json.loads((look / "status.json").read_text())["state"] == "finished"
        [row] = rows_of(look)
        assert row["step"] == step and "val-core/tiny/reward/mean@1" in row
        assert (look / "samples" / f"val_{step:08d}.jsonl").is_file()


@pytest.mark.distributed
def test_a_named_validation_set_is_sampled_as_it_says_and_has_metrics_of_its_own(two_ranks):
    look = two_ranks[0] / "disturbed" / "validations" / "1"
    [row] = rows_of(look)
    lines = (look / "samples" / "val-more_00000004.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 4 * 16 and max(s["response_length"] for s in samples) == 3
    mean = sum(s["score"] for s in samples) / len(samples)
    assert row["val-core/more/tiny/reward/mean@4"] == pytest.approx(mean)
    assert {f"val-core/more/tiny/{m}" for m in ("pass@1", "pass@2", "pass@4", "reward/maj@4")} <= {
        *row
    }
    assert "val-core/tiny/reward/mean@1" in row and "val-core/tiny/pass@1" not in row


@pytest.mark.distributed
def test_an_accepted_change_of_the_configuration_has_its_effect(two_ranks):
    """State comes from the checkpoint, configuration from the configuration."""
    folder, _ = two_ranks
    [row] = rows_of(folder / "changed")
    assert row["step"] == STEPS and row["actor/kl_coef"] == 0.5
    earlier = record_of(folder / "disturbed")  # it started in a copy of that run's folder
    earlier = {name: crc for name, crc in earlier.items() if not name.startswith("tiny_model/")}
    assert record_of(folder / "changed" / "old1") == earlier
    states = [
        json.loads((folder / run / "checkpoints/step_00000005/train_state.json").read_text())
        for run in ("changed", "whole")
    ]
    [[changed], [whole]] = (state["optimizers"]["actor"] for state in states)
    settings = ("weight_decay", "betas", "eps", "lr")
    assert [changed[key] for key in settings] == [0.2, [0.8, 0.95], 1e-4, whole["lr"]]


@pytest.mark.distributed
def test_what_ends_a_response_travels_with_the_model(two_ranks, tmp_path):
    """The policy that is exported stops where the one that was trained stops."""
    run = two_ranks[0] / "whole"
    want = (run / "tiny_model" / "generation_config.json").read_bytes()
    assert len(json.loads(want)["eos_token_id"]) == 32
    for step in list_checkpoints(run / "checkpoints"):
        assert (step / "assets" / "generation_config.json").read_bytes() == want
    out = export_hf(run, tmp_path / "hf")
    assert (out / "generation_config.json").read_bytes() == want


def moved_and_resharded(rank: int, world_size: int, folder: str) -> list[Any]:
    base = Path(folder)
    hybrid = ("actor.fsdp.fsdp_size=2", "trainer.async_save=false")
    return train_here(
        rank,
        world_size,
        [
            (str(base / "moved"), until(4, "actor.ulysses_sequence_parallel_size=2")),
            (str(base / "hybrid"), until(2, *hybrid)),
            (str(base / "hybrid"), until(4, "rollout.tensor_model_parallel_size=2")),
        ],
    )


@pytest.mark.distributed
def test_a_run_moves_from_two_ranks_to_four_to_one_and_between_shardings(two_ranks):
    folder, seen = two_ranks
    four = run_distributed(moved_and_resharded, 4, str(folder), timeout_s=120)[0]
    [one] = run_distributed(train_here, 1, [(str(folder / "moved"), until(STEPS))])[0]
    tokens = seen["whole"]
    assert four[0]["tokens"] == tokens[2:4]  # 2 ranks -> 4: steps 3 and 4
    assert one["tokens"] == tokens[4:]  # -> 1: step 5
    assert four[1]["tokens"] + four[2]["tokens"] == tokens[:4]  # HYBRID_SHARD 2x2 -> FULL_SHARD
    whole = rows_of(folder / "whole")
    for name in ("moved", "hybrid"):
        rows = rows_of(folder / name)
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        for a, b in zip(whole, rows, strict=False):
            for metric in COMPARED:
                assert a[metric] == pytest.approx(b[metric], rel=1e-5, abs=1e-6), (name, metric)


@pytest.mark.distributed
def test_a_killed_rank_is_restarted_by_torchrun_and_the_end_is_the_same(two_ranks, tmp_path):
    folder, run = two_ranks[0], tmp_path / "run"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--max-restarts=1"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "train_ppo.py"),
        *("--config", "ppo_tiny.yaml", f"trainer.default_local_dir={run}"),
        *("trainer.test_freq=0", "trainer.val_before_train=false", *until(STEPS)),
    ]
    job = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE
    )
    latest = run / "checkpoints" / "latest"
    deadline = time.monotonic() + 150
    while not latest.exists():
        assert job.poll() is None and time.monotonic() < deadline, job.stderr
        time.sleep(0.05)
    found = subprocess.run(["pgrep", "-f", f"train_ppo.py.*{run}"], capture_output=True, text=True)
    workers = [pid for pid in map(int, found.stdout.split()) if pid != job.pid]
    os.kill(workers[-1], signal.SIGKILL)
    _, err = job.communicate(timeout=200)
    assert job.returncode == 0, err[-3000:]
    rows = rows_of(run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for a, b in zip(rows_of(folder / "whole"), rows, strict=True):
        for name in COMPARED:
            assert a[name] == b[name], (a["step"], name)
    assert b"resumed from" in err
    left = subprocess.run(["pgrep", "-f", str(run)], capture_output=True, text=True)
    assert left.stdout == ""


@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.timeout(1800)
def test_twenty_kills_of_ranks_and_agents_lose_nothing(tmp_path):
    """Each start is killed at a random moment, a rank or torchrun itself, with SIGKILL."""
    source, steps, kills = random.Random(7), 60, 20
    overrides = ("trainer.test_freq=0", "trainer.val_before_train=false", "trainer.save_freq=1")
    overrides += (f"trainer.total_training_steps={steps}", "trainer.total_epochs=2", *STATEFUL)

    def start(run: Path, log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"),
                    *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "train_ppo.py"),
                    *("--config", "ppo_tiny.yaml", f"trainer.default_local_dir={run}", *overrides),
                ],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stderr=file,
            )

    assert start(tmp_path / "whole", tmp_path / "whole.log").wait(timeout=600) == 0
    run, log, agents = tmp_path / "run", tmp_path / "run.log", 0
    for _ in range(kills):
        status = json.loads((run / "status.json").read_text()) if run.exists() else {}
        if status.get("step", 0) >= steps:
            break
        (run / "status.json").unlink(missing_ok=True)
        job = start(run, log)
        wait_until((run / "status.json").exists, 120)
        time.sleep(source.uniform(0, 5))
        victims = [job.pid, *processes_of(run, job.pid)]
        victim = source.choice(victims)
        agents += victim == job.pid
        os.kill(victim, signal.SIGKILL)
        job.wait(timeout=120)
        wait_until(lambda: not processes_of(run, 0), 60)
    assert agents > 0
    assert start(run, log).wait(timeout=600) == 0, log.read_text()[-3000:]
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    rows, whole = rows_of(run), rows_of(tmp_path / "whole")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for a, b in zip(whole, rows, strict=True):
        for name in COMPARED:
            assert a[name] == b[name], (a["step"], name)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes_of(run: Path, without: int) -> list[int]:
    """Ranks and agents of the jobs of a run folder."""
    found = subprocess.run(["pgrep", "-f", f"train_ppo.py.*{run} "], capture_output=True, text=True)
    return [pid for pid in map(int, found.stdout.split()) if pid != without]
