"""OpenRLHF's flags, older and newer: sequences of an optimizer step become prompts."""

from ppo.config import load_config
from ppo.config.migrate.from_openrlhf import dialect
from ppo.config.migrate.given import read_given
from ppo.config.migrate.show import show
from ppo.config.migrate.translate import Translation, translate

# what examples/scripts/train_ppo_ray_hybrid_engine.sh sets, and a little more
SCRIPT = """
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json='{"working_dir": "/openrlhf"}' \\
   -- python3 -m openrlhf.cli.train_ppo_ray \\
   --ref_num_nodes 1 --actor_num_nodes 2 --actor_num_gpus_per_node 8 --colocate_all_models \\
   --vllm_num_engines 4 --vllm_tensor_parallel_size 2 --vllm_gpu_memory_utilization 0.5 \\
   --pretrain OpenRLHF/Llama-3-8b-sft-mixture --reward_pretrain OpenRLHF/Llama-3-8b-rm-700k \\
   --save_path ./llama3-8b-rlhf --ckpt_path ./llama3-8b-rlhf/ckpt --save_hf_ckpt \\
   --micro_train_batch_size 8 --train_batch_size 128 --micro_rollout_batch_size 16 \\
   --rollout_batch_size 1024 --n_samples_per_prompt 2 --max_epochs 1 --prompt_max_len 1024 \\
   --generate_max_len 1024 --zero_stage 3 --bf16 --actor_learning_rate 5e-7 --init_kl_coef 0.02 \\
   --prompt_data prompts.jsonl --input_key context_messages --apply_chat_template \\
   --normalize_reward --gradient_checkpointing --packing_samples --vllm_sync_backend nccl \\
   --enforce_eager --vllm_enable_sleep --deepspeed_enable_sleep --async_train \\
   --adam_betas 0.9 0.98 --eps_clip_low_high 0.2 0.28 --use_wandb {wandb_token}
"""


def translated(*words: str) -> Translation:
    given = read_given(words)
    return translate(dialect(given), given)


def test_a_script_of_older_flags(tmp_path):
    (tmp_path / "run.sh").write_text(SCRIPT)
    found = translated(str(tmp_path / "run.sh"))
    values = found.values
    assert values["data.train_batch_size"] == 1024 and values["actor.ppo_mini_batch_size"] == 64
    assert (values["check.nnodes"], values["check.nproc_per_node"]) == (2, 8)
    assert values["actor.optim.betas"] == [0.9, 0.98]
    assert (values["actor.clip_ratio_low"], values["actor.clip_ratio_high"]) == (0.2, 0.28)
    assert values["reward.model.enable"] is True and values["reward.normalize"] is True
    assert values["algorithm.kl_ctrl.kl_coef"] == 0.02 and values["algorithm.kl_penalty"] == "k1"
    assert "hf_model" in values["actor.checkpoint.save_contents"]
    assert found.defaults["critic.optim.lr"] == 9e-6
    assert found.defaults["actor.optim.lr_scheduler_type"] == "cosine"
    assert list(found.gaps) == ["async_train = true"]
    (tmp_path / "mine.yaml").write_text(show(found, "OpenRLHF"))
    assert load_config(tmp_path / "mine.yaml").actor.optim.min_lr_ratio == 0.1


def test_newer_flags_mean_the_same():
    found = translated(
        *("--train.batch_size", "64", "--rollout.batch_size", "16"),
        *("--rollout.n_samples_per_prompt", "8", "--algo.advantage.estimator", "dr_grpo"),
        *("--algo.kl.use_loss", "--algo.kl.init_coef", "1e-3", "--algo.kl.estimator", "k3"),
        *("--actor.model_name_or_path", "tiny", "--data.prompt_dataset", "tiny"),
        *("--eval.steps", "-1", "--ckpt.save_steps", "-1", "--critic.freezing_steps", "-1"),
        *("--actor.policy_loss_type", "gspo", "--reward.remote_url", "reward.py"),
        *("--data.label_key", "answer"),
    )
    values = found.values
    assert values["actor.ppo_mini_batch_size"] == 8 and values["rollout.n"] == 8
    assert values["algorithm.adv_estimator"] == "grpo"
    assert values["algorithm.norm_adv_by_std_in_grpo"] is False
    assert values["algorithm.use_kl_in_reward"] is False and values["actor.use_kl_loss"] is True
    assert values["actor.kl_loss_coef"] == 1e-3 and values["actor.kl_loss_type"] == "k3"
    assert (values["trainer.test_freq"], values["trainer.save_freq"]) == (-1, 0)
    assert values["actor.policy_loss.loss_mode"] == "gspo" and found.missing == []
    assert "--map answer=ground_truth" in found.gaps["data.label_key = answer"]
    assert "reward.function.path" in found.gaps["reward.remote_url = reward.py"]
    adaptive = translated("--kl_target", "6", "--train_batch_size", "10",
                          "--n_samples_per_prompt", "4")  # fmt: skip
    assert adaptive.values["algorithm.kl_ctrl.type"] == "adaptive"
    assert "no whole number of prompts" in adaptive.gaps["train_batch_size"]
