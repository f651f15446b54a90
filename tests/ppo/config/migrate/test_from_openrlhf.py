"""OpenRLHF's flags, older and newer: sequences of an optimizer step become prompts."""

from jinja2 import Template

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
    assert found.defaults["critic.model.path"] == "OpenRLHF/Llama-3-8b-rm-700k"
    assert found.defaults["actor.shuffle"] is True
    assert found.defaults["data.truncation"] == "right"
    assert "model.custom_chat_template" not in found.defaults  # --apply_chat_template
    assert set(found.gaps) == {
        "async_train = true",
        "normalize_reward = true",
        "reward_clip_range",  # not said, -10 to 10 there
    }
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
    assert found.defaults["actor.loss_agg_mode"] == "seq-mean-token-mean"
    assert "--map answer=ground_truth" in found.gaps["data.label_key = answer"]
    assert "reward.function.path" in found.gaps["reward.remote_url = reward.py"]
    adaptive = translated("--kl_target", "6", "--train_batch_size", "10",
                          "--n_samples_per_prompt", "4")  # fmt: skip
    assert adaptive.values["algorithm.kl_ctrl.type"] == "adaptive"
    assert "no whole number of prompts" in adaptive.gaps["train_batch_size"]


def test_newer_flags_of_each_optimizer():
    found = translated(
        *(
            "--actor.adam.lr",
            "5e-7",
            "--actor.adam.betas",
            "0.9",
            "0.99",
            "--critic.adam.lr",
            "1e-5",
        ),
        *(
            "--actor.lr_scheduler",
            "constant",
            "--actor.min_lr_ratio",
            "0.2",
            "--actor.max_norm",
            "2",
        ),
        *("--critic.min_lr_ratio", "0.3", "--actor.optim", "adam", "--critic.optim", "muon"),
        *("--data.max_len", "4096", "--rollout.max_new_tokens", "3072"),
    )
    values, written = found.values, found.defaults
    assert values["actor.optim.lr"] == 5e-7 and values["actor.optim.betas"] == [0.9, 0.99]
    assert (
        values["actor.optim.lr_scheduler_type"] == "constant" and values["actor.grad_clip"] == 2.0
    )
    assert values["actor.optim.min_lr_ratio"] == 0.0  # of another scheduler
    assert (values["critic.optim.lr"], values["critic.optim.min_lr_ratio"]) == (1e-5, 0.3)
    assert values["data.max_prompt_length"] == 1024 and values["data.max_response_length"] == 3072
    assert list(found.gaps) == ["critic.optim = muon"]
    # of the critic's own, for what the actor has others of
    assert written["critic.optim.betas"] == [0.9, 0.95] and written["critic.grad_clip"] == 1.0
    assert written["critic.optim.lr_scheduler_type"] == "cosine"
    older = translated("--adam_betas", "0.9", "0.99", "--lr_scheduler", "constant").defaults
    assert not {"critic.optim.betas", "critic.optim.lr_scheduler_type"} & older.keys()
    assert (
        "say data.max_prompt_length" in translated("--actor.adam.lr", "1e-6").gaps["data.max_len"]
    )


def test_the_critic_starts_from_the_first_reward_model_where_one_scores():
    reward = ("--pretrain", "a/sft", "--reward_pretrain", "a/rm")
    assert translated(*reward).defaults["critic.model.path"] == "a/rm"
    for words in (
        ("--remote_rm_url", "http://x"),
        ("--agent_func_path", "agent.py"),
        ("--advantage_estimator", "rloo"),
    ):
        assert "critic.model.path" not in translated(*reward, *words).defaults
    said = translated(*reward, "--critic_pretrain", "a/critic")
    assert said.values["critic.model.path"] == "a/critic"
    several = translated("--pretrain", "a/sft", "--reward_pretrain", "a/rm,b/rm")
    assert several.defaults["critic.model.path"] == "a/rm"
    assert "one reward model" in several.gaps["reward_pretrain = a/rm,b/rm"]
    assert "-10 and 10" in several.gaps["reward_clip_range"]


def test_prompts_are_text_as_it_is_unless_the_template_is_asked_for(tmp_path):
    found = translated("--pretrain", "tiny", "--prompt_data", "tiny", "--bf16")
    assert found.defaults["data.prompt_key"] == "input" and not found.gaps
    (tmp_path / "mine.yaml").write_text(show(found, "OpenRLHF"))
    template = load_config(tmp_path / "mine.yaml").model.custom_chat_template
    assert template is not None
    text = Template(template).render(messages=[{"role": "user", "content": "2 + 2 = "}])
    assert text == "2 + 2 = "
    for words in (("--apply_chat_template",), ("--input_template", "Q: {}")):
        assert "model.custom_chat_template" not in translated(*words).defaults


def test_evaluation_samples_four_responses_of_a_prompt():
    found = translated("--eval_dataset", "val.jsonl", "--eval_temperature", "0.8")
    assert found.values["rollout.val_kwargs.temperature"] == 0.8
    assert found.defaults["rollout.val_kwargs.n"] == 4
    newer = translated("--eval.dataset", "val.jsonl").defaults
    assert newer["rollout.val_kwargs.temperature"] == 0.6
    assert "rollout.val_kwargs.n" not in translated("--bf16").defaults


def test_what_a_flag_does_besides_its_value():
    overlong = translated("--overlong_buffer_len", "128").values
    assert overlong["reward.manager"] == "dapo" and overlong["reward.overlong_buffer.len"] == 128
    flat = translated("--no_advantage_std_norm", "--bf16")
    assert list(flat.gaps) == ["no_advantage_std_norm = true"]
    groups = ("--advantage_estimator", "group_norm")
    assert not translated("--no_advantage_std_norm", "--bf16", *groups).gaps  # does nothing there
    assert "0 to 1" in translated("--dynamic_filtering").gaps["dynamic_filtering_reward_range"]
    assert "bfloat16" in translated("--max_epochs", "1").gaps["bf16"]
    assert translated("--kl_target", "6").defaults["algorithm.kl_ctrl.max"] == 1000.0
    ordered = translated("--ring_attn_size", "2", "--train_batch_size", "64").defaults
    assert "actor.shuffle" not in ordered
    whole = translated("--train_batch_size", "64", "--rollout_batch_size", "64").defaults
    assert "actor.shuffle" not in whole


def test_weights_against_the_engine():
    older = translated("--enable_vllm_is_correction", "--vllm_is_truncated_threshold", "3").values
    ours = "algorithm.rollout_correction."
    assert (older[f"{ours}rollout_is"], older[f"{ours}rollout_is_threshold"]) == ("token", 3.0)
    flag = "--algo.advantage.is_correction"
    newer = translated(f"{flag}_enable", f"{flag}_type", "icepop", f"{flag}_threshold", "0.4", "4")
    assert newer.values[f"{ours}icepop"] == [0.4, 4]
    assert newer.values[f"{ours}rollout_is_threshold"] == 4.0
    cut = translated(f"{flag}_enable")
    assert cut.values[f"{ours}rollout_is_threshold"] == 5.0
    assert "below 0.5" in cut.gaps["algo.advantage.is_correction_enable = true"]
    assert f"{ours}rollout_is" not in translated(f"{flag}_type", "icepop").values
