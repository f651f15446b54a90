"""DAPO on its preset: the same groups on any number of ranks, exact resumes, the prompts' end."""

import json
from pathlib import Path
from typing import Any

import pytest

from ppo.config import load_config
from ppo.rollout.collector import Collector
from tests.distributed import run_distributed
from tests.test_resume import stop_once
from tests.test_train import rows_of, train_here

# seven in eight are wrong, so that of four responses about two in five groups differ
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if len(solution_str) % 11 == 3:
        raise ValueError("unlucky")
    right = (sum(map(ord, solution_str)) + len(ground_truth)) % 8 == 0
    return {"score": 2.0 * right - 1.0, "acc": right}
"""
COMPARED = (
    *("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean"),
    *("critic/advantages/max", "response_length/mean", "reward/failed", "reward/overlong_penalty"),
    *("filter_groups/num_gen_batches", "filter_groups/kept", "filter_groups/surplus"),
    *("filter_groups/dropped_right", "filter_groups/dropped_wrong", "reward/extra/acc"),
)


def until(step: int, folder: Path, *more: str) -> tuple[str, ...]:
    return (
        f"reward.function.path={folder / 'reward.py'}",
        *("reward.max_failed_fraction=0.5", "data.val_files=[]", "trainer.save_freq=1"),
        f"trainer.total_training_steps={step}",
        *more,
    )


PRESET = "dapo_tiny.yaml"
KEEP = ("algorithm.filter_groups.surplus=keep", "trainer.total_training_steps=3")
ENDS = ("trainer.total_training_steps=null", "data.train_max_samples=40", "trainer.save_freq=0")


def sampled_and_resumed(rank: int, world_size: int, folder: str) -> list[Any]:
    base = Path(folder)
    found: list[Any] = []
    if world_size == 1:
        jobs = [("one", until(3, base, *KEEP))]
    else:
        # step 1 has 6 rounds: this is in a later one of step 2, which is then made again
        undo = stop_once(Collector, "sample", str(base / "resumed"), 8)
        found = train_here(
            rank, world_size, [(str(base / "resumed"), until(2, base, KEEP[0]))], "cpu", PRESET
        )
        undo()
        tp = "rollout.tensor_model_parallel_size=2"
        jobs = [
            ("resumed", until(2, base, KEEP[0])),
            ("resumed", until(3, base, KEEP[0], "actor.ulysses_sequence_parallel_size=2")),
            ("ends", until(1, base, *ENDS, tp)),
            ("ends", until(1, base, *ENDS)),  # nothing is left
        ]
    jobs = [(str(base / name), overrides) for name, overrides in jobs]
    return found + train_here(rank, world_size, jobs, "cpu", PRESET)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    folder = tmp_path_factory.mktemp("dapo")
    (folder / "reward.py").write_text(REWARD)
    [[one]] = run_distributed(sampled_and_resumed, 1, str(folder))
    two = run_distributed(sampled_and_resumed, 2, str(folder), timeout_s=120)[0]
    assert [len(job["tokens"]) for job in two[:3]] == [1, 1, 1]  # stopped in step 2
    resumed = [tokens for job in two[:3] for tokens in job["tokens"]]
    return folder, {"one": one["tokens"], "resumed": resumed, "ends": two[3]["tokens"]}


@pytest.mark.distributed
def test_the_same_groups_are_trained_on_on_other_ranks_and_after_a_resume(runs):
    folder, tokens = runs
    assert tokens["one"] == tokens["resumed"] and len(tokens["one"]) == 3
    one, other = rows_of(folder / "one"), rows_of(folder / "resumed")
    for a, b in zip(one, other, strict=True):
        for name in COMPARED:
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), (a["step"], name)


@pytest.mark.distributed
def test_rounds_are_drawn_until_there_are_enough_groups_and_the_position_counts_them_all(runs):
    folder, tokens = runs
    rows = rows_of(folder / "one")
    assert [len(step) for step in tokens["one"]] == [8 * 4] * 3
    assert max(row["filter_groups/num_gen_batches"] for row in rows) > 2
    assert sum(row["filter_groups/surplus"] for row in rows) > 0
    assert all(row["filter_groups/kept"] == 8 and row["reward/failed"] > 0 for row in rows)
    waited = 0
    for row in rows:
        judged = 6 * row["filter_groups/num_gen_batches"]
        dropped = sum(row[f"filter_groups/dropped_{why}"] for why in ("right", "wrong", "failed"))
        assert judged - dropped + waited == 8 + row["filter_groups/surplus"]
        waited = row["filter_groups/surplus"]
    drawn = 6 * sum(row["filter_groups/num_gen_batches"] for row in rows)
    state = json.loads((folder / "one/checkpoints/step_00000003/train_state.json").read_text())
    sampler = state["state"]["sampler"]
    assert (sampler["epoch"], sampler["position"]) == (0, drawn)
    surplus = state["state"]["surplus"]
    assert (len(surplus["samples"]) if surplus else 0) == 4 * waited


@pytest.mark.distributed
def test_a_run_by_epochs_ends_with_its_prompts_saved_and_is_not_begun_again(runs):
    folder, tokens = runs
    rows = rows_of(folder / "ends")
    rounds = [row["filter_groups/num_gen_batches"] for row in rows]
    assert sum(rounds) == 40 // 6  # of 6 prompts each; the last 4 prompts are dropped
    assert 1 <= len(rows) <= 5 and max(rounds) > 1
    assert all(len(step) == 32 for step in tokens["ends"][:-1]) and len(tokens["ends"]) == len(rows)
    status = json.loads((folder / "ends/status.json").read_text())
    assert (status["state"], status["step"]) == ("finished", len(rows))
    assert (folder / f"ends/checkpoints/step_{len(rows):08d}").is_dir()


def test_the_preset_is_what_the_paper_uses():
    config = load_config(PRESET)
    assert config.algorithm.filter_groups.enable and not config.ref_enabled
    assert config.actor.clip_ratio_high > config.actor.clip_ratio_low
    assert (config.actor.loss_agg_mode, config.reward.manager) == ("token-mean", "dapo")
