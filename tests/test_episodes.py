"""Whole runs on episodes of several turns: exact token by token, on any number of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.quickstart import LETTERS, train_smollm2, validations
from tests.test_train import documented_metrics, rows_of, same_numbers, train_here

EPISODE = (
    f"rollout.episode.path={Path(__file__).with_name('an_episode.py')}",
    *("data.max_prompt_length=48", "data.max_response_length=80", "reward.max_failed_fraction=1"),
    *("trainer.total_training_steps=2", "trainer.save_freq=-1", "model.verify_forward=false"),
    "reward.num_workers=1",
)
SLEEPS = """
import asyncio, pathlib

async def episode(row, policy):
    await policy.chat(max_tokens=3)
    pathlib.Path({stop!r}).touch()
    await asyncio.sleep(600)
"""


def samples_of(folder: Path) -> list[dict[str, Any]]:
    """The logged ones of the first step."""
    lines = (folder / "samples" / "train_00000001.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A run on one rank, one that repeats what it has logged without running a tool, and one whose
    episodes sleep when they are to stop."""
    folder = tmp_path_factory.mktemp("episodes")
    sleeps = folder / "sleeps.py"
    sleeps.write_text(SLEEPS.format(stop=str(folder / "stopped" / "STOP")))
    jobs = [
        (str(folder / "run"), EPISODE),
        (str(folder / "again"), (*EPISODE, f"rollout.episode.replay={folder / 'run'}")),
        (str(folder / "stopped"), (*EPISODE, f"rollout.episode.path={sleeps}")),
    ]
    [(run, again, _)] = run_distributed(train_here, 1, jobs)
    return folder, run, again


@pytest.mark.distributed
def test_the_trainer_computes_what_the_engine_sampled_in_every_turn(single):
    folder, run, _ = single
    assert len(run["batches"]) == 2 and max(run["mismatch"]) < 1e-4
    rows = rows_of(folder / "run")
    documented = {name for name in documented_metrics() if name.startswith("episodes/")}
    for row in rows:
        assert {name for name in row if name.startswith("episodes/")} == documented
        assert 1 < row["episodes/turns"] <= 4
        assert row["episodes/observation_tokens"] > 0
        assert row["reward/failed"] == 16 * row["episodes/env_error"] > 0
        finishes = [row[f"episodes/finish/{name}"] for name in ("done", "error", "length")]
        assert sum(finishes) == pytest.approx(1)
        assert row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0
    batch = run["batches"][0]
    assert len(batch.response_ids) > 16  # branches have rows of their own
    for ids, mask, failed in zip(
        batch.response_ids, batch.response_mask, batch.failed.tolist(), strict=True
    ):
        assert mask.any() != failed
        assert failed or mask.sum() < len(ids)  # what was observed counts nowhere
    for row in samples_of(folder / "run"):
        kind = sum(map(ord, row["ground_truth"])) % 4
        if kind == 0:
            assert row["failure"].startswith("error: ") and row["score"] is None
        else:  # None is scored as a response is
            assert ("function" in row["components"]) == (kind == 3)
            assert ("episode" in row["components"]) == ("extra/length" in row["components"])


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_more_ranks_sample_the_same_episodes_and_train_the_same(single, tmp_path, world):
    folder, run, _ = single
    jobs = {"t1": (), "t2": ("rollout.tensor_model_parallel_size=2",)}
    keys = [(str(tmp_path / name), (*EPISODE, *keys)) for name, keys in jobs.items()]
    found = run_distributed(train_here, world, keys)
    for index, name in enumerate(jobs):
        for rank in range(world):
            assert found[rank][index]["tokens"] == run["tokens"], (name, rank)
            assert max(found[rank][index]["mismatch"]) < 1e-4
        same_numbers(rows_of(folder / "run"), rows_of(tmp_path / name))


@pytest.mark.distributed
def test_a_tape_repeats_an_episode_bit_by_bit(single):
    folder, run, again = single
    assert again["tokens"] == run["tokens"]
    for one, other in zip(run["batches"], again["batches"], strict=True):
        assert (one.advantages == other.advantages).all()
    logged, repeated = samples_of(folder / "run"), samples_of(folder / "again")
    assert [row["episode"] for row in logged] == [row["episode"] for row in repeated]
    assert all(row["episode"]["tape"] for row in logged)
    assert any(len(row["messages"]) > 2 for row in logged)


@pytest.mark.distributed
def test_a_stop_request_ends_episodes_that_run(single):
    folder = single[0] / "stopped"
    assert json.loads((folder / "status.json").read_text())["state"] == "stopped"
    asked, ended = (folder / name for name in ("STOP", "status.json"))
    assert ended.stat().st_mtime - asked.stat().st_mtime < 10


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_smollm2_with_feedback_beats_its_single_turn(tmp_path):
    """On held-out questions: against its own first try, and against a model trained on one try."""
    alone = train_smollm2(
        *(tmp_path / "alone", "ppo_smollm2_cpu.yaml", "data.max_response_length=29"), task=LETTERS
    )
    rows = train_smollm2(tmp_path / "feedback", "episodes/try_again.yaml", task=LETTERS)
    single = validations(alone, "/reward/mean")
    first, last = (validations(rows, f"/{name}/mean") for name in ("first_try", "last_try"))
    print("alone", single, "first try", first, "last try", last)
    assert last[-1] >= max(first[-1], single[-1]) + 0.1, (single, first, last)
    assert last[-1] >= last[0] + 0.25, last
