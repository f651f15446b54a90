"""TRL's configurations: batches of one device in sequences become prompts of an iteration."""

import pytest

from ppo.config import load_config
from ppo.config.migrate.from_trl import CONFIG_CLASSES, dialect
from ppo.config.migrate.given import read_given
from ppo.config.migrate.show import show
from ppo.config.migrate.translate import Translation, translate

FILES = ("--model_name_or_path", "tiny", "--dataset_name", "prompts.parquet")


def translated(*words: str) -> Translation:
    given = read_given(words, config_classes=CONFIG_CLASSES)
    return translate(dialect(given), given)


PYTHON = """
from trl import GRPOConfig, GRPOTrainer
RATE = 1e-6
arguments = GRPOConfig(
    output_dir="out", learning_rate=RATE, beta=0.04, num_generations=4, epsilon_high=0.28,
    per_device_train_batch_size=4, gradient_accumulation_steps=8, num_iterations=2,
    max_completion_length=768, loss_type="dr_grpo", scale_rewards=False, report_to=["wandb"],
    max_steps=400, save_steps=100, bf16=True, use_vllm=True, vllm_mode="colocate",
    mask_truncated_completions=True, reward_weights=[1.0, 0.5], adam_beta2=0.99,
)
"""


def test_a_python_file_with_grpo(tmp_path):
    (tmp_path / "train.py").write_text(PYTHON)
    found = translated(str(tmp_path / "train.py"), *FILES, "check.nproc_per_node=8")
    values = found.values
    # 4 sequences x 8 steps x 8 devices = 256 sequences of 4 = 64 prompts, seen twice
    assert values["data.train_batch_size"] == values["actor.ppo_mini_batch_size"] == 64
    assert values["actor.ppo_epochs"] == 2 and values["trainer.total_training_steps"] == 200
    assert values["trainer.save_freq"] == 50
    assert (values["actor.use_kl_loss"], values["actor.kl_loss_coef"]) == (True, 0.04)
    assert values["actor.loss_agg_mode"] == "seq-mean-token-sum-norm"
    assert values["algorithm.norm_adv_by_std_in_grpo"] is False
    assert values["trainer.logger"] == ["console", "jsonl", "wandb"]
    assert values["actor.optim.betas"] == [0.9, 0.99]
    assert found.defaults["actor.optim.lr_scheduler_type"] == "linear"
    assert found.defaults["algorithm.use_kl_in_reward"] is False
    assert set(found.gaps) == {
        "mask_truncated_completions = true",
        "learning_rate=RATE",
        "vllm_importance_sampling_correction, on where nothing is said",
    }
    assert found.defaults["actor.kl_loss_type"] == "low_var_kl+"  # use_bias_correction_kl
    (tmp_path / "mine.yaml").write_text(show(found, "TRL"))
    config = load_config(tmp_path / "mine.yaml", ["reward.function.weights=null"])
    assert config.algorithm.adv_estimator == "grpo" and config.rollout.n == 4


def test_a_launch_script_with_ppo(tmp_path):
    (tmp_path / "run.sh").write_text(
        "accelerate launch --num_processes 4 --config_file ds.yaml examples/scripts/ppo/ppo.py \\\n"
        "  --dataset_name prompts.jsonl --learning_rate 2e-6 --num_ppo_epochs 1 \\\n"
        "  --num_mini_batches 2 --per_device_train_batch_size 16 \\\n"
        "  --gradient_accumulation_steps 4 \\\n"
        "  --total_episodes 10000 --sft_model_path tiny --reward_model_path tiny \\\n"
        "  --missing_eos_penalty 1.0 --stop_token eos --response_length 53 --kl_coef 0.1\n"
    )
    found = translated(str(tmp_path / "run.sh"))
    values = found.values
    assert values["algorithm.adv_estimator"] == "gae" and values["reward.model.enable"] is True
    assert values["actor.ppo_mini_batch_size"] == 16 * 4 * 4
    assert values["data.train_batch_size"] == 2 * 16 * 4 * 4
    assert values["trainer.total_training_steps"] == 20  # of 512 prompts
    assert values["actor.optim.lr"] == values["critic.optim.lr"] == 2e-6
    assert values["algorithm.kl_ctrl.kl_coef"] == 0.1
    assert found.defaults["algorithm.lam"] == 0.95
    assert found.defaults["critic.cliprange_value"] == 0.2
    assert found.defaults["actor.shuffle"] is True and "rollout.ignore_eos" not in found.defaults
    assert set(found.gaps) == {"missing_eos_penalty = 1.0"} and found.missing == []


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (("--beta", "0"), "actor.use_kl_loss", False),
        (("--importance_sampling_level", "sequence"), "actor.policy_loss.loss_mode", "gspo"),
        (("--loss_type", "sapo", "--sapo_temperature_neg", "1.1"), "actor.tau_neg", 1.1),
        (("--loss_type", "grpo"), "actor.loss_agg_mode", "seq-mean-token-mean"),
        (("--loss_type", "sapo"), "actor.loss_agg_mode", "seq-mean-token-mean"),
        (("--rloo_k", "4", "--beta", "0.1"), "algorithm.kl_ctrl.kl_coef", 0.1),
        (("--rloo_k", "4"), "algorithm.adv_estimator", "rloo"),
        (("--steps_per_generation", "4"), "data.train_batch_size", 32),
        (("--top_k", "0"), "rollout.top_k", -1),
        (("--save_strategy", "no"), "trainer.save_freq", -1),
        (("--lr_scheduler_type", "constant_with_warmup"), "actor.optim.lr_scheduler_type",
         "constant"),
    ],
)  # fmt: skip
def test_what_a_value_means_here(words, key, value):
    found = translated(*FILES, *words, "check.nproc_per_node=8")
    assert found.values[key] == value and not found.gaps


def defaults_of(*words: str) -> dict[str, object]:
    return dict(translated(*FILES, *words, "check.nproc_per_node=8").defaults)


def test_adapters_have_the_defaults_of_the_class_that_asks_for_them(tmp_path):
    found = translated(*FILES, "--use_peft", "true", "--lora_r", "32", "check.nproc_per_node=8")
    assert found.values["model.lora_rank"] == 32 and not found.gaps
    of_model_config = {
        "model.lora_alpha": 32.0,
        "model.lora_dropout": 0.05,
        "model.lora_target_modules": ["q_proj", "v_proj"],
    }
    assert of_model_config.items() <= found.defaults.items()
    assert defaults_of("--use_peft", "true")["model.lora_rank"] == 16
    off = translated(*FILES, "--lora_r", "32", "check.nproc_per_node=8")
    assert "model.lora_rank" not in off.values and "use_peft" in off.unneeded["lora_r = 32"]
    (tmp_path / "train.py").write_text(
        "GRPOTrainer(model, args=RLOOConfig(beta=0.1), peft_config=LoraConfig(lora_dropout=0.1))"
    )
    peft = translated(str(tmp_path / "train.py"), *FILES, "check.nproc_per_node=8")
    assert peft.values["algorithm.adv_estimator"] == "rloo"  # not what LoraConfig might be
    assert peft.values["model.lora_dropout"] == 0.1
    assert (peft.defaults["model.lora_rank"], peft.defaults["model.lora_alpha"]) == (8, 8.0)


def test_the_value_model_of_ppo_has_no_adapters():
    words = ("--num_ppo_epochs", "2", "--use_peft", "true", "--reward_model_path", "a/rm")
    found = defaults_of(*words)
    assert found["critic.model.lora_rank"] == 0 and found["critic.model.path"] == "a/rm"
    assert "critic.model.lora_rank" not in defaults_of("--num_ppo_epochs", "2")


def test_the_end_of_a_sequence_ends_nothing_in_ppo_unless_asked_for():
    assert defaults_of("--num_ppo_epochs", "2")["rollout.ignore_eos"] is True
    assert "rollout.ignore_eos" not in defaults_of("--num_ppo_epochs", "2", "--stop_token", "eos")


def test_prompts_are_cut_where_they_were_and_never_left_out():
    assert defaults_of()["data.filter_overlong_prompts"] is False
    assert "data.truncation" not in defaults_of()
    assert defaults_of("--max_prompt_length", "256")["data.truncation"] == "left"


def test_the_weights_against_the_engine_are_on_by_default():
    words = (*FILES, "--use_vllm", "true", "check.nproc_per_node=8")
    ((name, why),) = translated(*words).gaps.items()
    assert name.startswith("vllm_importance_sampling_correction") and "sequence_mask" in why
    cut = translated(*words, "--vllm_importance_sampling_mode", "token_truncate")
    assert cut.values["algorithm.rollout_correction.rollout_is"] == "token" and not cut.gaps
    assert cut.defaults["algorithm.rollout_correction.rollout_is_threshold"] == 3.0
    assert not translated(*words, "--vllm_importance_sampling_correction", "false").gaps
    assert not translated(*words, "--rloo_k", "2").gaps  # GRPO's alone
    assert not translated(*FILES, "check.nproc_per_node=8").gaps


def test_rloo_sums_over_a_sequence():
    found = translated(*FILES, "--rloo_k", "2", "check.nproc_per_node=8")
    assert found.defaults["actor.loss_agg_mode"] == "seq-mean-token-sum" and not found.gaps
    more = translated(*FILES, "--rloo_k", "2", "--num_iterations", "2", "check.nproc_per_node=8")
    assert "whole sequences" in more.gaps["RLOO"]


def test_batches_are_shuffled_before_they_are_cut():
    assert defaults_of("--steps_per_generation", "4")["actor.shuffle"] is True
    assert "actor.shuffle" not in defaults_of()


def test_evaluation_samples_as_training_does():
    found = defaults_of(
        "--eval_strategy", "steps", "--num_generations", "4", "--temperature", "0.9"
    )
    assert found["rollout.val_kwargs.n"] == 4 and found["rollout.val_kwargs.temperature"] == 0.9
    assert found["trainer.val_before_train"] is False
    assert "trainer.test_freq" not in found  # 10 there as here: logging_steps
    assert defaults_of("--eval_strategy", "steps", "--logging_steps", "3")["trainer.test_freq"] == 3
    assert defaults_of()["trainer.test_freq"] == -1
    assert "rollout.val_kwargs.n" not in defaults_of()


def test_the_bound_of_cispo_is_of_the_weight_itself():
    cispo = ("--loss_type", "cispo", "check.nproc_per_node=8")
    found = translated(*FILES, *cispo, "--epsilon_high", "5.0")
    assert found.values["actor.clip_ratio_high"] == 4.0 and not found.gaps
    assert found.defaults["actor.clip_ratio_low"] > 0.999
    assert "actor.clip_ratio_high" in translated(*FILES, *cispo).gaps["epsilon_high"]
    assert translated(*FILES, *cispo, "--epsilon_high", "0.28").gaps


def test_the_gradient_of_the_kl_loss_is_unbiased_by_default():
    assert defaults_of("--beta", "0.04")["actor.kl_loss_type"] == "low_var_kl+"
    off = translated(*FILES, "--beta", "0.04", "--use_bias_correction_kl", "false")
    assert off.values["actor.kl_loss_type"] == "low_var_kl"
    assert "actor.kl_loss_type" not in defaults_of("--beta", "0.0")


def test_what_cannot_be_known_is_said():
    found = translated("--num_generations", "3", "--dataset_name", "trl-lib/tldr")
    assert "no whole number of prompts" in found.gaps["batches"]
    assert "ppo.data.prepare" in found.gaps["dataset_name = trl-lib/tldr"]
    assert found.missing == ["data.train_files", "model.path"]
    assert "say how many" in translated(*FILES, "--beta", "0").gaps["batches"]
