"""Whole runs with adapters: the reference for free, first ratios, resumes on other shards."""

import json
from typing import Any

import pyarrow.parquet as pq
import pytest

from ppo.errors import InputError
from sharding.checkpoint import export_hf
from tests.distributed import run_distributed
from tests.ppo.rollout.test_targets import alone
from tests.quickstart import train_smollm2, validations
from tests.test_train import rows_of, same_numbers, train_here

LORA = (
    *("model.lora_rank=4", "actor.optim.lr=1e-2", "critic.optim.lr=1e-2"),
    *("trainer.save_freq=1", "actor.ppo_mini_batch_size=16", "data.val_files=[]"),
    *("model.verify_forward=false", "trainer.total_training_steps=2"),
)


def whole_and_resumed(rank: int, world_size: int, folder: str) -> list[Any]:
    """Two iterations; the second one again, from the checkpoint of the first, with other shards."""
    elsewhere = ("actor.fsdp.fsdp_size=1", "rollout.tensor_model_parallel_size=2")
    first = f"trainer.resume_mode={folder}/whole/checkpoints/step_00000001"
    jobs = [(f"{folder}/whole", LORA), (f"{folder}/again", (*LORA, first, *elsewhere))]
    return [seen["tokens"] for seen in train_here(rank, world_size, jobs)]


@pytest.mark.distributed
def test_a_run_with_adapters_has_its_reference_for_free_and_resumes_on_other_shards(tmp_path):
    whole, again = run_distributed(whole_and_resumed, 2, str(tmp_path))[0]
    rows = rows_of(tmp_path / "whole")
    assert rows[0]["actor/ref_kl"] == 0.0 < rows[1]["actor/ref_kl"]
    assert [row["actor/ppo_kl"] for row in rows] == [0.0, 0.0]  # one mini-batch: ratio 1
    assert all(row["training/rollout_probs_diff_max"] < 1e-5 for row in rows)
    assert all(row["reshard/received_mib"] == row["reshard/lower_bound_mib"] for row in rows)
    assert rows[0]["reshard/adapters_mib"] > 0
    same_numbers(rows[1:], rows_of(tmp_path / "again"))
    assert again == whole[1:]
    for model in ("actor", "critic"):
        out = export_hf(tmp_path / "again", tmp_path / model, model=model, adapter=True)
        config = json.loads((out / "adapter_config.json").read_text())
        assert config["modules_to_save"] == (["score"] if model == "critic" else None)
        assert (export_hf(tmp_path / "again", tmp_path / f"{model}_hf", model=model)).is_dir()

    run, adapter, critic = (
        f"--checkpoint={tmp_path}/{name}" for name in ("again", "actor", "critic")
    )
    alone((f"{tmp_path}/1.parquet", run, "model.lora_rank=4"), (f"{tmp_path}/2.parquet", adapter))
    assert pq.read_table(tmp_path / "1.parquet") == pq.read_table(tmp_path / "2.parquet")
    for out, wrong, words in (
        ("3.parquet", (critic,), r"modules_to_save = \['score'\] is not read here"),
        (
            "4.parquet",
            (adapter, f"{adapter}_hf"),
            "is a whole model, and .* has adapters of rank 4",
        ),
    ):
        with pytest.raises(InputError, match=words):
            alone((str(tmp_path / out), *wrong))


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_smollm2_learns_the_quickstarts_task_by_a_quarter_on_adapters_alone(tmp_path):
    """The quickstart's model, data and steps; ten times its learning rate, for adapters."""
    keys = ("model.lora_rank=32", "model.lora_alpha=32")
    rates = ("actor.optim.lr=2e-4", "critic.optim.lr=1e-3")
    rows = train_smollm2(tmp_path, "ppo_smollm2_cpu.yaml", *keys, *rates)
    scores = validations(rows, "/reward/mean@1")
    assert scores[-1] - scores[0] >= 0.25, scores
    assert next(row for row in rows if row["step"] == 1)["actor/ref_kl"] == 0.0
