"""Every preset of configs/tiny/ runs, and learns: seeded runs on the tiny model.

In CI three presets learn for some steps, one seed, and the others run for one; the full tier has
three seeds of all, and RLHF from pairs to policy. tests/README.md has the figures of its last run.
"""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import train_ppo
from ppo.config import load_config
from ppo.rollout import train_reward_model
from tests.distributed import run_distributed
from tests.test_train import rows_of, train_here

TINY = Path(train_ppo.__file__).parent / "configs" / "tiny"
QUICK = ("data.val_files=[]", "trainer.save_freq=-1", "model.verify_forward=false")
# of the mean score of the last three steps over that of the first, of at most 1
MARGINS = {
    "tiny/grpo": 0.3,
    "tiny/gspo": 0.3,
    "tiny/cispo": 0.25,
    "tiny/rloo": 0.3,
    "tiny/reinforce_plus_plus": 0.2,
    "tiny/remax": 0.05,
    "tiny/opd": 0.1,
    "tiny/guess": 0.2,
    "ppo_tiny": 0.015,
    "dapo_tiny": 0.1,
}
TWELVE = ("trainer.total_training_steps=12",)
"""of the distillation: later the KL to the teacher is no more than noise"""
LONGER = (
    *("trainer.total_training_steps=24", "actor.optim.lr=1e-2", "critic.optim.lr=1e-2"),
    "actor.ppo_max_token_len_per_gpu=4096",
)
"""of presets that are too short to learn, so that a first look takes seconds"""
LARGER = ("data.train_batch_size=64", "actor.ppo_mini_batch_size=16", "rollout.max_num_seqs=64")
"""where one response a prompt is sampled"""


def run(name: str, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Rows of a run of a preset in this process's world, or in one that is started for it."""
    run_distributed(train_jobs, 1, [(name, str(folder), overrides)])
    return rows_of(folder)


def train_jobs(rank: int, world_size: int, jobs: list[tuple[str, str, tuple[str, ...]]]) -> None:
    """Run presets one after the other."""
    for name, folder, overrides in jobs:
        train_here(rank, world_size, [(folder, overrides)], "cpu", f"{name}.yaml")


def gain(rows: list[dict[str, Any]]) -> float:
    scores = [row["critic/score/mean"] for row in rows]
    return fmean(scores[-3:]) - fmean(scores[:3])


def quarters(rows: list[dict[str, Any]]) -> list[float]:
    """Mean reverse KL to the teacher of each quarter of the run, the exact mean of -advantage."""
    found = [-row["critic/advantages/mean"] for row in rows]
    size = len(found) // 4
    return [fmean(found[i * size : (i + 1) * size]) for i in range(4)]


def teacher_of(folder: Path) -> str:
    """The model that a run with HF_MODEL has written."""
    [model] = folder.glob("checkpoints/step_*/hf_actor")
    return f"ref.model.path={model}"


HF_MODEL = ("actor.checkpoint.save_contents=[model, hf_model]", "trainer.save_freq=0")


def test_there_is_a_margin_for_every_preset_that_learns():
    names = {f"tiny/{path.stem}" for path in TINY.glob("*.yaml")}
    assert names - {"tiny/reward_model"} <= set(MARGINS)


@pytest.mark.distributed
def test_presets_run_and_some_learn_within_a_few_steps(tmp_path):
    """One process for all; what the first has learned is the teacher of the last."""
    few = (*QUICK, "trainer.total_training_steps=8")
    one = (*QUICK, "trainer.total_training_steps=1")
    teacher = (tmp_path / "cispo" / "checkpoints" / "step_00000008" / "hf_actor").as_posix()
    overrides: dict[str, tuple[str, ...]] = {
        "cispo": (*few, *HF_MODEL),
        **dict.fromkeys(("gspo", "grpo", "rloo", "reinforce_plus_plus", "remax"), one),
        "reward_model": (*one, "reward.model.path=tiny"),
        "guess": (*QUICK, "trainer.total_training_steps=10"),
        "opd": (*QUICK, *TWELVE, f"ref.model.path={teacher}"),
    }
    assert set(overrides) == {path.stem for path in TINY.glob("*.yaml")}
    jobs = [(f"tiny/{name}", str(tmp_path / name), keys) for name, keys in overrides.items()]
    run_distributed(train_jobs, 1, jobs)
    rows = {name: rows_of(tmp_path / name) for name in overrides}
    assert gain(rows["cispo"]) > 0.15
    assert gain(rows["guess"]) > 0.1
    turns = [row["episodes/turns"] for row in rows["guess"]]
    assert fmean(turns[-3:]) < fmean(turns[:3]) - 0.8  # of 8
    falling = quarters(rows["opd"])
    assert falling == sorted(falling, reverse=True) and falling[-1] < falling[0] / 2
    assert gain(rows["opd"]) > 0.05  # which nothing but the teacher knows of
    for name, found in rows.items():
        assert all(row["actor/grad_norm"] > 0 for row in found), name


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_preset_raises_its_reward(tmp_path, seed):
    gains, found = {}, []
    for name in MARGINS:
        folder = tmp_path / name
        keys = (*QUICK, f"trainer.seed={seed}")
        if name == "tiny/grpo":
            keys = (*keys, *HF_MODEL)
        if name == "tiny/opd":
            keys = (*keys, *TWELVE, teacher_of(tmp_path / "tiny" / "grpo"))
        if not name.startswith("tiny/"):
            keys = (*keys, *LONGER, *(LARGER if name == "ppo_tiny" else ()))
        rows = run(name, folder, *keys)
        gains[name] = gain(rows)
        if name == "tiny/opd":
            found = quarters(rows)
    print(f"seed {seed}:", {name: round(value, 3) for name, value in gains.items()})
    print(f"seed {seed}: reverse KL of opd by quarters", [round(x, 3) for x in found])
    assert found == sorted(found, reverse=True)
    assert {name: value for name, value in gains.items() if value < MARGINS[name]} == {}


@pytest.mark.full
@pytest.mark.distributed
def test_a_task_is_learned_with_every_setting_that_saves_memory(tmp_path):
    settings = {
        "bfloat16": ("actor.optim.state_dtype=bfloat16",),
        "8bit": ("actor.optim.state_dtype=8bit",),
        "on_host": ("actor.fsdp.optimizer_on_host=true",),
        "8bit_on_host": ("actor.optim.state_dtype=8bit", "actor.fsdp.optimizer_on_host=true"),
        "selective": ("model.checkpoint_policy=selective", "model.mlp_block_rows=64"),
    }
    jobs = [("tiny/grpo", str(tmp_path / name), (*QUICK, *s)) for name, s in settings.items()]
    run_distributed(train_jobs, 1, jobs)
    gains = {name: gain(rows_of(tmp_path / name)) for name in settings}
    print({name: round(value, 3) for name, value in gains.items()})
    assert {name: g for name, g in gains.items() if g < MARGINS["tiny/grpo"]} == {}


@pytest.mark.full
@pytest.mark.distributed
def test_ppo_raises_a_trained_reward_models_score_and_the_controller_holds_the_kl(tmp_path):
    """On held-out prompts; the KL stays within 1.5 times its target, as a mean of five steps."""
    out = tmp_path / "reward"
    words = f"--config tiny/reward_model.yaml --data tiny --val tiny --epochs 2 --out {out}"
    assert train_reward_model.main([*words.split(), "actor.optim.lr=3e-3"]) == 0
    target = load_config("tiny/reward_model.yaml").algorithm.kl_ctrl.target_kl
    for seed in (1, 2, 3):
        folder = tmp_path / f"run{seed}"
        rows = run(
            "tiny/reward_model",
            folder,
            *(f"reward.model.path={out}", f"trainer.seed={seed}", "trainer.save_freq=-1"),
            *("data.val_max_samples=-1", "trainer.test_freq=0", "trainer.val_before_train=true"),
        )
        name = "val-core/tiny/reward/mean@1"
        before, after = (row[name] for row in (rows[0], rows[-1]))
        kls = [row["actor/ref_kl"] for row in rows if "actor/ref_kl" in row]
        means = [fmean(kls[i : i + 5]) for i in range(len(kls) - 4)]
        print(f"seed {seed}: held-out score {before:.2f} -> {after:.2f}, KL {max(means):.2f}")
        assert after > before + 1.5
        assert max(means) < 1.5 * target
