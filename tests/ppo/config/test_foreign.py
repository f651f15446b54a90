"""People arrive with files and flags of other trainers: every name of theirs is answered once."""

import re
from pathlib import Path

import pytest

from ppo.check.rules import check_config
from ppo.check.warnings import config_warnings
from ppo.config import ConfigError, load_config, parse_args
from ppo.config.foreign import (
    ANYWHERE,
    NOT_BUILT,
    SAME,
    _with_what_is_missing,
    foreign,
    not_built,
)
from ppo.config.schema import schema, section_paths
from ppo.config.trainers import openrlhf, trl, verl

REQUIRED = ["model.path=tiny", "data.train_files=tiny"]

GRPO_CONFIG = """
learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout
cast_lm_head_to_fp32 remove_unused_columns num_generations num_generations_eval
max_completion_length ds3_gather_for_generation shuffle_dataset pad_to_multiple_of
generation_batch_size steps_per_generation temperature top_p top_k min_p generation_kwargs
chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl
vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host
vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
vllm_max_model_length vllm_tensor_parallel_size beta num_iterations epsilon delta epsilon_high
sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg
vespo_lambda_neg importance_sampling_level reward_weights multi_objective_aggregation
scale_rewards loss_type mask_truncated_completions sync_ref_model ref_model_mixup_alpha
ref_model_sync_steps top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min
entropy_coef_max entropy_coef_delta entropy_target max_tool_calling_iterations
vllm_importance_sampling_correction vllm_importance_sampling_mode
vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min off_policy_mask_threshold
use_bias_correction_kl log_completions log_multimodal num_completions_to_print
log_unique_prompts log_completions_hub_repo use_transformers_continuous_batching
transformers_continuous_batching_config use_transformers_paged vllm_importance_sampling_cap
per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps bf16
lr_scheduler_type warmup_ratio weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm
gradient_checkpointing logging_steps save_steps save_strategy save_total_limit eval_steps
eval_strategy output_dir run_name report_to seed deepspeed push_to_hub optim
"""

OPENRLHF_FLAGS = """
ref.num_nodes train.colocate_all vllm.num_engines vllm.tensor_parallel_size vllm.sync_backend
vllm.enable_prefix_caching vllm.enable_sleep vllm.gpu_memory_utilization
algo.advantage.is_correction_level algo.advantage.is_correction_threshold train.async_enable
eval.steps ckpt.save_steps logger.logging_steps ckpt.path ckpt.save_hf ckpt.max_num ckpt.max_mem
ckpt.load_enable local_rank ds.zero_stage actor.gradient_checkpointing_enable ds.param_dtype
train.enable_ema ds.adam_offload ds.attn_implementation ds.packing_samples
train.dynamic_batch_enable rollout.max_tokens_per_gpu train.max_tokens_per_gpu ds.lora.rank
ckpt.output_dir train.num_episodes rollout.batch_size rollout.micro_batch_size train.max_epochs
data.max_len rollout.max_new_tokens data.max_samples actor.eps_clip actor.eps_clip_low_high
actor.dual_clip critic.value_clip algo.advantage.lambd algo.advantage.gamma train.batch_size
train.micro_batch_size reward.normalize_enable train.seed critic.freezing_steps
rollout.n_samples_per_prompt algo.kl.target algo.kl.init_coef actor.policy_loss_type
algo.kl.estimator actor.entropy_coef algo.advantage.estimator algo.kl.use_loss
reward.overlong_buffer_len ds.ring_attn_size actor.model_name_or_path reward.remote_url
critic.model_name_or_path ref.offload train.agent_func_path data.prompt_dataset data.prompt_probs
eval.dataset eval.temperature data.input_key data.label_key data.input_template
data.apply_chat_template logger.wandb.project algo.dynamic_filtering_enable
pretrain reward_pretrain critic_pretrain remote_rm_url prompt_data prompt_data_probs input_key
label_key input_template apply_chat_template prompt_max_len generate_max_len max_samples
rollout_batch_size micro_rollout_batch_size train_batch_size micro_train_batch_size
n_samples_per_prompt max_epochs num_episodes actor_learning_rate critic_learning_rate init_kl_coef
kl_target kl_estimator use_kl_loss lambd eps_clip value_clip max_norm l2 adam_offload zero_stage
gradient_checkpointing packing_samples colocate_all_models ref_num_nodes actor_num_gpus_per_node
vllm_num_engines vllm_tensor_parallel_size vllm_gpu_memory_utilization enforce_eager
advantage_estimator normalize_reward freezing_actor_steps save_value_network save_path ckpt_path
save_hf_ckpt load_checkpoint use_wandb wandb_project lora_rank target_modules ring_attn_size
dynamic_filtering overlong_buffer_len aux_loss_coef use_liger_kernel async_train use_ms
"""

# a run of verl's examples, with Hydra's + and a few of each kind
VERL_RUN = """
algorithm.adv_estimator=grpo
data.train_files=tiny
data.train_batch_size=1024
data.filter_overlong_prompts_workers=8
data.return_raw_chat=True
data.dataloader_num_workers=4
data.image_key=images
actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct
actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.model.use_shm=False
actor_rollout_ref.model.lora_rank=0
actor_rollout_ref.model.use_fused_kernels=False
actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.optim.warmup_style=constant
actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16
actor_rollout_ref.actor.use_dynamic_bsz=False
actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.use_torch_compile=False
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.model_dtype=float32
actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bfloat16
actor_rollout_ref.actor.checkpoint.load_contents=[model]
actor_rollout_ref.ref.fsdp_config.param_offload=True
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16
actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.mode=async
actor_rollout_ref.rollout.n=5
actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.gpu_memory_utilization=0.6
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16
actor_rollout_ref.rollout.val_kwargs.do_sample=True
actor_rollout_ref.rollout.multi_turn.enable=False
+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3
actor_rollout_ref.rollout.agent.num_workers=8
actor_rollout_ref.hybrid_engine=True
algorithm.use_kl_in_reward=False
critic.model.path=Qwen/Qwen2-7B-Instruct
critic.model.fsdp_config.optimizer_offload=False
critic.model.use_remove_padding=True
critic.forward_micro_batch_size_per_gpu=32
custom_reward_function.path=reward.py
++custom_reward_function.reward_kwargs.scale=2
reward_model.reward_manager=naive
trainer.critic_warmup=0
trainer.logger=[console]
trainer.project_name=verl_grpo_example_gsm8k
trainer.n_gpus_per_node=8
trainer.nnodes=1
trainer.default_hdfs_dir=null
trainer.save_freq=20
trainer.total_epochs=15
ray_kwargs.ray_init.num_cpus=8
global_profiler.steps=null
"""


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*REQUIRED, *overrides], check=rules)
    return caught.value.problems


def rules(config):
    return check_config(config, world_size=8, ranks_per_node=8)


def answer(path: str) -> str:
    entry, other = not_built(path), foreign(path, set(schema()))
    return entry.instead if entry else other.advice if other else ""


@pytest.mark.parametrize("names", [GRPO_CONFIG, OPENRLHF_FLAGS], ids=["trl", "openrlhf"])
def test_every_name_of_another_trainer_is_known(names):
    assert [name for name in names.split() if name not in schema() and not answer(name)] == []


def test_advice_names_keys_that_exist_or_are_said_to_be_unbuilt():
    texts = [*verl.ADVICE.values(), *ANYWHERE.values()]
    names = {
        name
        for text in texts
        for name in re.findall(r"\b(?:data|model|actor|critic|ref|reward|rollout|algorithm|trainer"
                               r"|guards)\.[a-z_.]*[a-z_]", text)
    }  # fmt: skip
    names |= {ours for ours in (*SAME.values(), *verl.RENAMED.values()) if ours}
    assert len(names) > 100
    free_form = ("rollout.engine_kwargs", "reward.function.kwargs")
    known = {*schema(), *section_paths(), *NOT_BUILT, "python -m sharding.checkpoint"}
    for name in names - {"reward.py", "model.ground_truth"}:
        path = name.rstrip(".")
        inside = not_built(path) is not None or path.startswith(free_form)
        assert path in known or inside, name


def test_advice_can_be_followed_or_says_that_what_it_names_is_not_built():
    values = 0
    for path in [*verl.ADVICE, *ANYWHERE]:
        advice = answer(path)
        if "not built" in advice:
            continue
        for key, _, value in re.findall(r"\b([a-z_]+(?:\.[a-z_]+)+)(=([^\s,;:)]+))?", advice):
            assert not not_built(key), (path, advice)
            if value and key in schema():
                load_config(None, [*REQUIRED, f"{key}={value}"])
                values += 1
    assert values > 5
    said = _with_what_is_missing("use actor.router_replay")
    assert said == "use actor.router_replay, which is not built yet"


def test_a_run_of_verl_is_right_after_one_round_of_corrections():
    given = VERL_RUN.split("\n")[1:-1]
    found = problems(*given)
    assert all(re.search("another trainer|not built|remove|write|use", line) for line in found)
    corrected = []
    for override in given:
        path = override.lstrip("+").partition("=")[0]
        said = [
            line for line in found if line.startswith(path + " ") or line.startswith(path + ":")
        ]
        if not said:
            corrected.append(override)
        elif written := re.search(r"write (\S+)$", said[0]):
            corrected.append(f"{written[1]}={override.partition('=')[2]}")
        else:
            assert re.search("remove it|use |write what", said[0]), said
    config = load_config(None, corrected, check=rules)
    assert (config.rollout.n, config.model.path) == (5, "Qwen/Qwen2-7B-Instruct")
    assert config.reward.function.kwargs == {"scale": 2}


def test_a_value_under_a_foreign_name_is_checked_in_the_same_round():
    found = problems("actor_rollout_ref.rollout.n=x", "num_iterations=0", "--kl_estimator=k9")
    assert [line.partition(" = ")[0] for line in found] == [
        "actor_rollout_ref.rollout.n", "num_iterations", "kl_estimator",
        "rollout.n", "actor.ppo_epochs", "algorithm.kl_penalty",
    ]  # fmt: skip
    # and it counts: with n = 8 under verl's name there is no problem of grpo's
    (only,) = problems("actor_rollout_ref.rollout.n=8", "algorithm.adv_estimator=grpo")
    assert "write rollout.n" in only


@pytest.mark.parametrize(
    "key",
    ["rollout.log_prob_micro_batch_size_per_gpu", "actor_rollout_ref.ref.log_prob_micro_batch_size",
     "critic.forward_micro_batch_size_per_gpu", "reward_model.micro_batch_size_per_gpu",
     "micro_rollout_batch_size"],
)  # fmt: skip
def test_a_micro_batch_of_sequences_is_no_budget_of_tokens(key):
    (found,) = problems(f"{key}=16")
    assert "counts sequences" in found and "remove it" in found and "write" not in found


def test_a_token_budget_below_the_longest_sequence_is_warned_about():
    config = load_config(None, [*REQUIRED, "actor.log_prob_max_token_len_per_gpu=16"])
    assert config_warnings(config, world_size=8) == [
        "actor.log_prob_max_token_len_per_gpu = 16: less than the longest sequence (1024 tokens): "
        "such a sequence gets a micro-batch of its own"
    ]


def test_an_overlong_buffer_is_no_reward_model():
    (found,) = problems("reward_model.overlong_buffer.len=128")
    assert "write reward.overlong_buffer.len" in found
    assert "use reward.model" not in found


def test_hydras_plus_and_tilde_are_understood(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "rollout: {n: 3, top_p: 0.9}\nactor: {optim: {lr: 1e-3, eps: 1e-6}}\n"
    )
    config = load_config(
        tmp_path / "a.yaml", [*REQUIRED, "+rollout.n=4", "~rollout.top_p", "~actor.optim"]
    )
    assert (config.rollout.n, config.rollout.top_p) == (4, 1.0)
    assert (config.actor.optim.lr, config.actor.optim.eps) == (1e-6, 1e-8)
    assert load_config(None, [*REQUIRED, "~rollout.n"]).rollout.n == 1
    (found,) = problems("~rollout.m")
    assert "rollout.m" in found and "unknown key" in found


def test_flags_may_have_their_value_in_the_next_word():
    options = parse_args(
        ["--config", "x", "--actor.optim.lr", "1e-5", "--use_vllm", "--pretrain", "tiny", "a.b=1"]
    )
    assert options.overrides == [
        "--actor.optim.lr=1e-5", "--use_vllm=true", "--pretrain=tiny", "a.b=1"
    ]  # fmt: skip


def test_the_tables_of_other_trainers_name_nothing_twice():
    for module in (trl, openrlhf):
        assert not module.SAME.keys() & module.ADVICE.keys()
    assert not verl.RENAMED.keys() & verl.ADVICE.keys()
    # a name that is a key of ours already would never be looked up
    assert not (SAME.keys() | verl.RENAMED.keys()) & schema().keys()
    assert Path(verl.__file__).parent.name == "trainers"


def test_nothing_that_is_built_is_said_not_to_be():
    """A misspelt key of a section would be answered so."""
    for path in NOT_BUILT:
        assert not [key for key in schema() if key == path or key.startswith(f"{path}.")], path
