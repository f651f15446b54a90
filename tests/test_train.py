"""The whole loop on ppo_tiny.yaml: the same numbers on any number of ranks, and exact resumes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import train_ppo
from ppo.batch import RolloutBatch
from ppo.config import load_config
from ppo.run import Run
from sharding.mesh import build_mesh
from tests.distributed import run_distributed

COMPARED = (
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/entropy",
    "actor/ref_kl",
    "critic/vf_loss",
    "critic/grad_norm",
    "critic/advantages/max",
    "critic/values/mean",
    "critic/score/mean",
    "response_length/mean",
)
BASE = ("trainer.save_freq=0", "trainer.test_freq=0", "trainer.val_before_train=false")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, one dict a step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train_here(rank: int, world_size: int, jobs: list[tuple[str, tuple[str, ...]]]) -> list[Any]:
    """Run each (folder, overrides) in this world; what was sampled, and the first ratios."""
    seen: list[Any] = []
    update = train_ppo.update_actor

    def spy(actor: Any, batch: RolloutBatch, *rest: Any) -> None:
        seen[-1]["tokens"].append(batch.response_ids)
        assert batch.advantages is not None
        advantages = batch.advantages[batch.response_mask].double()
        seen[-1]["whitened"].append((advantages.mean().item(), advantages.std().item()))
        update(actor, batch, *rest)

    train_ppo.update_actor = spy
    try:
        for folder, overrides in jobs:
            seen.append({"tokens": [], "whitened": []})
            config = load_config(
                "ppo_tiny.yaml", [*BASE, f"trainer.default_local_dir={folder}", *overrides]
            )
            mesh = build_mesh(config.dims(world_size, world_size), torch.device("cpu"))
            with Run(config, mesh, command=["test"]) as run:
                train_ppo.train(config, run)
            dist.barrier()
    finally:
        train_ppo.update_actor = update
    return seen


def same_numbers(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in one] == [row["step"] for row in other]
    for a, b in zip(one, other, strict=True):
        for name in COMPARED:
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), (a["step"], name)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Any]:
    """Rows and samples of the run on one rank."""
    folder = tmp_path_factory.mktemp("single") / "run"
    [seen] = run_distributed(train_here, 1, [(str(folder), ())])
    return rows_of(folder), seen[0]


@pytest.mark.distributed
def test_four_ranks_shard_and_cut_in_any_way_and_train_the_same(single, tmp_path):
    jobs = {
        "full": (),
        "hybrid": ("actor.fsdp.fsdp_size=2",),
        "no_shard_micro_1": (
            "actor.fsdp.fsdp_size=1",
            "actor.use_dynamic_bsz=false",
            "actor.ppo_micro_batch_size_per_gpu=1",
        ),
        "padded_micro_2": (
            "actor.use_dynamic_bsz=false",
            "actor.ppo_micro_batch_size_per_gpu=2",
            "model.use_remove_padding=false",
        ),
        "sp_2": ("actor.ulysses_sequence_parallel_size=2",),
        "tp_4": ("rollout.tensor_model_parallel_size=4",),
        "tp_2": ("rollout.tensor_model_parallel_size=2", "parallel.align_to_rollout=true"),
    }
    results = run_distributed(
        train_here, 4, [(str(tmp_path / name), o) for name, o in jobs.items()], timeout_s=120
    )
    rows, seen = single
    for index, name in enumerate(jobs):
        same_numbers(rows, rows_of(tmp_path / name))
        for rank in range(4):
            assert results[rank][index]["tokens"] == seen["tokens"], (name, rank)


@pytest.mark.distributed
def test_two_ranks_without_balance_train_the_same(single, tmp_path):
    jobs = [
        (str(tmp_path / "balanced"), ()),
        (
            str(tmp_path / "all"),
            ("trainer.balance_batch=false", "actor.use_dynamic_bsz=false"),
        ),
    ]
    results = run_distributed(train_here, 2, jobs)
    for index, (folder, _) in enumerate(jobs):
        same_numbers(single[0], rows_of(Path(folder)))
        assert results[0][index]["tokens"] == single[1]["tokens"]


@pytest.mark.distributed
def test_advantages_are_whitened_over_the_batch_and_lengths_are_ragged(single):
    rows, seen = single
    lengths = {len(r) for step in seen["tokens"] for r in step}
    assert len(lengths) > 5
    for mean, std in seen["whitened"]:
        assert mean == pytest.approx(0, abs=1e-5)
        assert std == pytest.approx(1, abs=1e-4)
    assert all(math.isfinite(row["actor/grad_norm"]) for row in rows)
    assert all(row["reward/failed"] == 0 for row in rows)


@pytest.mark.distributed
def test_the_first_ratio_of_an_iteration_is_exactly_one(tmp_path):
    """One mini-batch in an iteration: everything is the first mini-batch."""
    overrides = ("actor.ppo_mini_batch_size=16", "algorithm.use_kl_in_reward=true")
    folder = tmp_path / "run"
    run_distributed(train_here, 2, [(str(folder), overrides)])
    for row in rows_of(folder):
        assert row["actor/ppo_kl"] == 0.0
        assert row["actor/ppo_kl_k3"] == 0.0
        assert row["actor/pg_clipfrac"] == 0.0


@pytest.mark.distributed
def test_grpo_trains_without_a_critic(tmp_path):
    overrides = (
        "algorithm.adv_estimator=grpo",
        "rollout.n=2",
        "algorithm.use_kl_in_reward=false",
        "actor.use_kl_loss=true",
        "actor.entropy_coeff=0.01",
        "trainer.total_training_steps=2",
    )
    folder = tmp_path / "run"
    run_distributed(train_here, 2, [(str(folder), overrides)])
    for row in rows_of(folder):
        assert "critic/vf_loss" not in row
        assert row["actor/kl_loss"] >= 0
        assert row["actor/grad_norm"] > 0
