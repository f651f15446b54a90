"""The whole loop on ppo_tiny.yaml: the same numbers on any number of ranks, and exact resumes."""

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import train_ppo
from ppo.batch.samples import RolloutBatch
from ppo.config import load_config
from ppo.data.dataset import Prompt
from ppo.engines.contract import Completion
from ppo.kl import make_kl_controller
from ppo.metrics import Metrics
from ppo.run.run import Run
from ppo.tracking.trace import read_events
from sharding.mesh import build_mesh
from tests.distributed import run_distributed
from tests.ppo.batches import make_batch, put_together

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
POLICY = "actor.fsdp.offload_policy=true"
TWO_STEPS = "trainer.total_training_steps=2"
"""an update, and the reshard and samples of what it has made"""
BASE = ("trainer.save_freq=0", "trainer.test_freq=0", "trainer.val_before_train=false")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, one dict a step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train_here(
    rank: int,
    world_size: int,
    jobs: list[tuple[str, tuple[str, ...]]],
    device_type: str = "cpu",
    preset: str = "ppo_tiny.yaml",
) -> list[Any]:
    """Run each (folder, overrides) in this world; what was sampled, and the batches whole."""
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    seen: list[Any] = []
    update = train_ppo.update_actor

    def spy(actor: Any, batch: RolloutBatch, *rest: Any) -> None:
        whole = put_together(batch)
        seen[-1]["tokens"].append(whole.response_ids)
        seen[-1]["batches"].append(whole)
        advantages = whole.advantages[whole.response_mask].double()
        seen[-1]["whitened"].append((advantages.mean().item(), advantages.std().item()))
        if batch.old_logprobs is not None:
            difference = (batch.old_logprobs - batch.rollout_logprobs)[batch.response_mask]
            seen[-1]["mismatch"].append(difference.abs().max().item() if len(difference) else 0.0)
        update(actor, batch, *rest)

    train_ppo.update_actor = spy
    try:
        for folder, overrides in jobs:
            seen.append({"tokens": [], "whitened": [], "batches": [], "mismatch": []})
            config = load_config(preset, [*BASE, f"trainer.default_local_dir={folder}", *overrides])
            mesh = build_mesh(config.dims(world_size, world_size), device)
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
    """Each choice once, in runs that have several of them."""
    jobs = {
        "hybrid_tp_4": (
            "actor.fsdp.fsdp_size=2",
            "actor.fsdp.optimizer_on_host=true",
            "model.checkpoint_policy=selective",
            "rollout.tensor_model_parallel_size=4",
        ),
        "no_shard_micro_1": (
            "actor.fsdp.fsdp_size=1",
            "actor.use_dynamic_bsz=false",
            "actor.ppo_micro_batch_size_per_gpu=1",
        ),
        "padded_micro_2": (
            "actor.use_dynamic_bsz=false",
            "actor.ppo_micro_batch_size_per_gpu=2",
            "model.use_remove_padding=false",
            "model.mlp_block_rows=20",
        ),
        "sp_2_tp_2": (
            "actor.ulysses_sequence_parallel_size=2",
            "rollout.tensor_model_parallel_size=2",
            "parallel.align_to_rollout=true",
        ),
    }
    folders = [(str(tmp_path / name), (TWO_STEPS, *o)) for name, o in jobs.items()]
    results = run_distributed(train_here, 4, folders, timeout_s=120)
    rows, seen = single
    for index, name in enumerate(jobs):
        same_numbers(rows[:2], rows_of(tmp_path / name))
        for rank in range(4):
            assert results[rank][index]["tokens"] == seen["tokens"][:2], (name, rank)


@pytest.mark.distributed
def test_two_ranks_without_balance_train_the_same(single, tmp_path):
    jobs = [
        (str(tmp_path / "balanced"), (TWO_STEPS,)),
        (
            str(tmp_path / "all"),
            (TWO_STEPS, "trainer.balance_batch=false", "actor.use_dynamic_bsz=false"),
        ),
    ]
    results = run_distributed(train_here, 2, jobs)
    for index, (folder, _) in enumerate(jobs):
        same_numbers(single[0][:2], rows_of(Path(folder)))
        assert results[0][index]["tokens"] == single[1]["tokens"][:2]


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


FAILS_AT_FIVES = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1 / ((len(solution_str) + len(ground_truth)) % 5) + len(ground_truth)
"""


@pytest.mark.distributed
def test_every_estimator_without_a_critic_trains_on_what_it_is_defined_to_be(tmp_path):
    (tmp_path / "reward.py").write_text(FAILS_AT_FIVES)
    names = ("rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax")
    shared = (
        *("algorithm.use_kl_in_reward=false", "rollout.n=3", "trainer.total_training_steps=1"),
        *(f"reward.function.path={tmp_path / 'reward.py'}", "reward.max_failed_fraction=1"),
        "data.val_files=[]",
    )
    jobs = [(str(tmp_path / n), (*shared, f"algorithm.adv_estimator={n}")) for n in names]
    for seen in run_distributed(train_here, 2, jobs):
        batches: dict[str, Any] = {
            name: job["batches"][0] for name, job in zip(names, seen, strict=True)
        }
        first = batches["rloo"]
        for batch in batches.values():
            assert batch.response_ids == first.response_ids and len(batch.scores) == 48
            assert 0 < batch.failed.sum() < 48 and batch.advantages is not None
            assert not batch.advantages[batch.failed].any()
        kept = [i for i in range(48) if not batches["rloo"].failed[i]]
        centred = {}
        for i in kept:
            members = [j for j in kept if first.group_ids[j] == first.group_ids[i]]
            others = [first.scores[j].item() for j in members if j != i]
            score = first.scores[i].item()
            if not others:  # its siblings have failed: nothing to be compared with
                for name in ("rloo", "opo", "reinforce_plus_plus_baseline"):
                    assert_advantage(batches[name], i, 0.0)
                continue
            assert_advantage(batches["rloo"], i, score - sum(others) / len(others))
            lengths = [len(first.response_ids[j]) for j in members]
            weighted = sum(
                first.scores[j].item() * n for j, n in zip(members, lengths, strict=True)
            ) / sum(lengths)
            assert_advantage(batches["opo"], i, score - weighted)
            centred[i] = score - (sum(others) + score) / len(members)
        assert_whitened(batches["reinforce_plus_plus_baseline"], centred)
        # without a KL penalty and at gamma 1 the reward to go is the score
        assert_whitened(batches["reinforce_plus_plus"], {i: first.scores[i].item() for i in kept})
        remax = batches["remax"]
        assert len(remax.greedy_scores) == 16
        for i in range(48):
            group = int(remax.group_ids[i])
            siblings = remax.failed[
                remax.group_ids == group
            ]  # all, where the greedy one has failed
            assert remax.failed[i] == (first.failed[i] or siblings.all())
            if not remax.failed[i]:
                difference = first.scores[i] - remax.greedy_scores[group]
                assert_advantage(remax, i, difference.item())
    alone = len(kept) - len(centred)
    for name in ("rloo", "opo", "reinforce_plus_plus_baseline"):
        assert rows_of(tmp_path / name)[0]["reward/alone"] == alone
    row = rows_of(tmp_path / "remax")[0]
    assert row["reward/greedy_score"] > 0 and row["reward/failed"] == remax.failed.sum()
    assert "critic/vf_loss" not in row and row["actor/grad_norm"] > 0


def assert_advantage(batch: Any, i: int, expected: float) -> None:
    """Every token of sequence i has this advantage."""
    found = batch.advantages[i][batch.response_mask[i]].tolist()
    assert found == pytest.approx([expected] * len(batch.response_ids[i]), abs=1e-5)


def assert_whitened(batch: Any, scores: dict[int, float]) -> None:
    """The scores at every token of their sequences, whitened over all tokens."""
    tokens = [s for i, s in scores.items() for _ in batch.response_ids[i]]
    mean, std = statistics.fmean(tokens), statistics.stdev(tokens)
    for i, score in scores.items():
        assert_advantage(batch, i, (score - mean) / std)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Rows of runs on two ranks: with GRPO and what else ppo_tiny.yaml leaves off; of failures."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "reward.py").write_text("def compute_score(*sample, **more):\n    return 1 / 0\n")
    failing = (
        *(f"reward.function.path={folder / 'reward.py'}", "reward.max_failed_fraction=1"),
        *("algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=16", "data.val_files=[]"),
        TWO_STEPS,
    )
    overrides = (
        "algorithm.adv_estimator=grpo",
        "rollout.n=2",
        "algorithm.use_kl_in_reward=false",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.reject.seq_mean_k1=[0.9, 1.1]",
        "algorithm.rollout_correction.rollout_token_veto_threshold=1e-3",
        *("rollout.top_p=0.9", "rollout.top_k=100"),
        "actor.use_kl_loss=true",
        "actor.kl_loss_type=full",
        "ref.fsdp.mixed_precision.param_dtype=bfloat16",
        "actor.entropy_coeff=0.01",
        TWO_STEPS,
        *("trainer.save_freq=1", "trainer.profile_steps=[2]"),
    )
    bypass = (
        *("algorithm.adv_estimator=grpo", "rollout.n=2", "algorithm.use_kl_in_reward=false"),
        *("algorithm.rollout_correction.preset=bypass_ppo_clip", "actor.ppo_epochs=2"),
        "trainer.total_training_steps=1",
    )
    whole = ("actor.ppo_mini_batch_size=16", "algorithm.use_kl_in_reward=true", TWO_STEPS)
    jobs = {"grpo": overrides, "failing": failing, "bypass": bypass, "whole": whole}
    run_distributed(train_here, 2, [(str(folder / name), jobs[name]) for name in jobs])
    profiles = sorted((folder / "grpo" / "profile").rglob("*.*"))
    status = json.loads((folder / "grpo" / "status.json").read_text())
    rows = {name: rows_of(folder / name) for name in jobs}
    return rows | {"profiles": [{"path": path} for path in profiles], "status": [status]}


@pytest.fixture(scope="module")
def grpo(pair: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return pair["grpo"]


@pytest.mark.distributed
def test_grpo_trains_without_a_critic(grpo):
    assert len(grpo) == 2
    for row in grpo:
        assert "critic/vf_loss" not in row
        assert row["actor/kl_loss"] >= 0
        assert row["actor/grad_norm"] > 0


@pytest.mark.distributed
def test_the_first_ratio_of_an_iteration_is_exactly_one(pair):
    """One mini-batch in an iteration: everything is the first mini-batch."""
    assert len(pair["whole"]) == 2
    for row in pair["whole"]:
        assert row["actor/ppo_kl"] == 0.0
        assert row["actor/ppo_kl_k3"] == 0.0
        assert row["actor/pg_clipfrac"] == 0.0


@pytest.mark.distributed
def test_a_step_that_is_profiled_leaves_a_trace_of_each_rank_a_table_and_metrics(pair):
    first, second = pair["grpo"]
    assert "timing_share/comm" not in first
    assert 0 < second["profile/all_gather_s"] < second["profile/window_s"]
    assert 0 < second["timing_share/comm"] < 1
    paths = [found["path"] for found in pair["profiles"]]
    names = ["rank_0000.trace.json.gz", "rank_0001.trace.json.gz", "summary.md"]
    assert [path.name for path in paths] == names
    assert {path.parent.name for path in paths} == {"step_00000002"}
    assert "| communication, exposed |" in paths[2].read_text()
    for path in paths[:2]:
        events = {event["name"] for event in read_events(path)}
        assert {"gloo:all_gather", "aten::mm"} <= events
        assert sum("Optimizer.step" in name for name in events) == 1


@pytest.mark.distributed
def test_the_status_of_a_run_has_the_seconds_of_the_parts_of_its_start(pair):
    [status] = pair["status"]
    parts = ["prompts", "rewards", "models", "engine", "first_iteration"]
    assert list(status["startup_s"]) == parts
    assert all(seconds >= 0 for seconds in status["startup_s"].values())


@pytest.mark.distributed
def test_weights_of_engine_and_trainer_are_one_also_where_top_p_and_top_k_cut(grpo):
    """Both log-probs are of the whole distribution: what is cut away is in neither."""
    for row in grpo:
        assert row["rollout_corr/is_mean"] == pytest.approx(1, abs=1e-4)
        assert row["rollout_corr/eff_sample_size"] == pytest.approx(1, abs=1e-4)
        assert row["rollout_corr/rs_masked_fraction"] == row["rollout_corr/veto_fraction"] == 0


@pytest.mark.distributed
def test_bypassing_the_old_log_probs_saves_their_pass_and_measures_in_the_first_mini_batch(pair):
    [row] = pair["bypass"]
    assert "timing_s/old_log_prob" not in row and "timing_s/old_log_prob" in pair["grpo"][0]
    assert row["actor/entropy"] > 0 and row["actor/grad_norm"] > 0
    assert 0 < row["training/rollout_probs_diff_max"] < 1e-4  # weights have not moved yet
    assert row["actor/ppo_kl_k3"] > 1e-5  # over both epochs they have


@pytest.mark.distributed
def test_a_step_in_which_every_sample_failed_takes_no_optimizer_step_and_follows_no_kl(pair):
    assert len(pair["failing"]) == 2
    for row in pair["failing"]:
        assert row["reward/failed"] == 16
        assert not {"actor/grad_norm", "critic/grad_norm", "actor/kl_coef"} & row.keys()


@pytest.mark.parametrize(
    ("correction", "mean", "largest", "share"),
    [  # ratios of the five tokens: 1, 0.5 | 4, 1, 1
        (["rollout_is=token"], 7.5 / 5, 4, 7.5**2 / (5 * 19.25)),
        (["rollout_is=sequence"], 13 / 5, 4, 13**2 / (5 * 48.5)),  # 0.5, 0.5 | 4, 4, 4
        (["icepop=[0.6, 2]"], 7.5 / 5, 4, 7.5**2 / (5 * 19.25)),
    ],
)
def test_the_weights_of_the_rollout_correction_are_logged_as_before_truncation(
    correction, mean, largest, share
):
    config = load_config(
        "ppo_tiny.yaml", [f"algorithm.rollout_correction.{key}" for key in correction]
    )
    prompt = Prompt(0, [7], "", None, {}, "")
    engine = ([0.5, 0.5], [0.2, 0.9, 0.4])
    batch = make_batch(
        [prompt] * 2, [Completion([5] * len(p), [math.log(x) for x in p], "stop") for p in engine]
    )
    batch.old_logprobs = torch.tensor([[0.5, 0.25, 1.0], [0.8, 0.9, 0.4]]).log()
    batch.values = torch.zeros(2, 3)
    metrics = Metrics()
    controller = make_kl_controller(config.algorithm.kl_ctrl)
    train_ppo.add_advantages(batch, config, controller, metrics)
    found = metrics.reduce()
    assert found["rollout_corr/is_mean"] == pytest.approx(mean, rel=1e-5)
    assert found["rollout_corr/is_max"] == pytest.approx(largest, rel=1e-5)
    assert found["rollout_corr/eff_sample_size"] == pytest.approx(share, rel=1e-5)
    assert batch.loss_weights is not None and batch.loss_weights.max() <= 2  # truncated there


# Metrics of ppo/README.md that the runs of this file do not have, and when there are any.
ELSEWHERE = {
    "memory_gib/PHASE": "on CUDA",
    **dict.fromkeys(
        (
            *("filter_groups/num_gen_batches", "filter_groups/kept", "filter_groups/surplus"),
            *("filter_groups/dropped_right", "filter_groups/dropped_wrong"),
            "filter_groups/dropped_failed",
        ),
        "with algorithm.filter_groups",
    ),
    **dict.fromkeys(
        (
            *("episodes/turns", "episodes/tool_calls", "episodes/observation_tokens"),
            *("episodes/branches", "episodes/tool_timeout", "episodes/tool_error"),
            *("episodes/parse_error", "episodes/env_error", "episodes/finish/done"),
            *("episodes/finish/max_turns", "episodes/finish/length", "episodes/finish/timeout"),
            *("episodes/finish/error", "episodes/no_turn"),
        ),
        "with rollout.episode",
    ),
    "reward/overlong_penalty": "with reward.manager dapo",
    "reward/overlong": "with reward.manager dapo",
    "perf/max_memory_allocated_gb": "on CUDA",
    "perf/max_memory_share": "on CUDA",
    "reward/variance_part/NAME": "where a score has several components",
    "response_length/mean_counted": "where a sample does not count",
    "response_length/clip_ratio_counted": "where a sample does not count",
    "degeneration/looping_counted": "where a sample does not count",
    "actor/pg_covfrac": "with loss_mode clip_cov or kl_cov",
    "reshard/adapters_mib": "with model.lora_rank, on several ranks",
    "perf/mfu/actor": "on a device whose peak is known",
    "perf/mfu/critic": "on a device whose peak is known",
    "guard/ACTION": "where a rule has fired",
    "guard/rolled_back": "after a rollback",
    "guard/lr_factor/MODEL": "after scale_lr",
    "guard/kl_factor": "after scale_kl_coef",
    "reward/extra/NAME": "where the reward returns a dict",
    "val-aux/SOURCE/NAME/mean": "where the reward returns a dict",
    "training/pooled": "with data.difficulty.pool",
    "reward/running_mean": "with reward.normalize",
    "reward/running_std": "with reward.normalize",
    "critic/returns/running_mean": "with critic.normalize_returns",
    "critic/returns/running_std": "with critic.normalize_returns",
    "reward/model_score": "with a reward model",
    "reward/function_score": "with a reward model beside a function",
    "reward/greedy_score": "with adv_estimator remax",
    "timing_s/reward_model": "with a reward model",
    "val-core/SOURCE/pass@K": "with rollout.val_kwargs.n > 1",
    "val-core/SOURCE/reward/maj@N": "with rollout.val_kwargs.n > 1",
}


@pytest.mark.distributed
def test_every_metric_of_a_run_is_in_the_readme_and_every_one_there_is_real(single, grpo):
    logged = {name for row in [*single[0], *grpo] for name in row} - {"step"}
    assert ELSEWHERE.keys() <= documented_metrics() and not ELSEWHERE.keys() & logged
    entries = documented_metrics() - ELSEWHERE.keys()
    assert {name for name in logged if not any(fits(name, e) for e in entries)} == set()
    assert {e for e in entries if not any(fits(name, e) for name in logged)} == set()


def documented_metrics() -> set[str]:
    """The names in the first column of the table of metrics, {a,b} written out."""
    readme = Path(train_ppo.__file__).parent / "ppo" / "README.md"
    text = readme.read_text(encoding="utf-8").split("## Metrics")[1]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    found: set[str] = set()
    for name in names:
        head, _, rest = name.partition("{")
        inner, _, tail = rest.partition("}")
        found |= {head + part + tail for part in inner.split(",")}
    return found


def fits(name: str, entry: str) -> bool:
    """Whether the table's entry, with its words in capitals for any text, is this name."""
    return re.fullmatch(re.sub("SOURCE|N$", ".+", entry), name) is not None


@pytest.mark.gpu
@pytest.mark.distributed
def test_gpus_train_the_same_when_everything_rests_on_the_host_between_its_uses(tmp_path):
    world_size = min(2, torch.cuda.device_count())
    half = (
        "trainer.device=cuda",
        "actor.fsdp.mixed_precision.param_dtype=bfloat16",
        "rollout.dtype=bfloat16",
    )
    resting = (
        "actor.fsdp.param_offload=true",
        "actor.fsdp.optimizer_offload=true",
        "model.enable_activation_offload=true",
        "trainer.save_freq=1",
    )
    jobs = {"resident": half, "resting": half + resting, "policy": (*half, POLICY)}
    if world_size == 2:
        jobs["sp_tp"] = (
            *half,
            "actor.ulysses_sequence_parallel_size=2",
            "rollout.tensor_model_parallel_size=2",
        )
    run_distributed(
        train_here,
        world_size,
        [(str(tmp_path / name), overrides) for name, overrides in jobs.items()],
        "cuda",
        device_type="cuda",
        timeout_s=300,
    )
    rows = {name: rows_of(tmp_path / name) for name in jobs}
    for name, steps in rows.items():
        assert len(steps) == 3
        for row in steps:
            assert all(math.isfinite(row[metric]) for metric in COMPARED), (name, row["step"])
            # trainer and engine agree on what was sampled
            assert row["training/rollout_probs_diff_mean"] < 0.02, (name, row["step"])
    for name in ("resting", "policy"):
        for metric in COMPARED:
            one, other = rows["resident"][0][metric], rows[name][0][metric]
            assert other == pytest.approx(one, rel=2e-2, abs=1e-4), (name, metric)
