"""OpenRLHF's flags (train_ppo_ray, with underscores up to 0.9 and with dots since) and ours.

Pure data.
"""

from __future__ import annotations

# a flag -> the key that holds the same value here
SAME = {
    "pretrain": "model.path",
    "actor.model_name_or_path": "model.path",
    "critic_pretrain": "critic.model.path",
    "critic.model_name_or_path": "critic.model.path",
    "reward_pretrain": "reward.model.path",
    "reward.model_name_or_path": "reward.model.path",
    "prompt_data": "data.train_files",
    "data.prompt_dataset": "data.train_files",
    "eval_dataset": "data.val_files",
    "eval.dataset": "data.val_files",
    "input_key": "data.prompt_key",
    "data.input_key": "data.prompt_key",
    "prompt_max_len": "data.max_prompt_length",
    "generate_max_len": "data.max_response_length",
    "rollout.max_new_tokens": "data.max_response_length",
    "max_samples": "data.train_max_samples",
    "data.max_samples": "data.train_max_samples",
    "rollout_batch_size": "data.train_batch_size",
    "rollout.batch_size": "data.train_batch_size",
    "n_samples_per_prompt": "rollout.n",
    "rollout.n_samples_per_prompt": "rollout.n",
    "eval_n_samples_per_prompt": "rollout.val_kwargs.n",
    "eval.n_samples_per_prompt": "rollout.val_kwargs.n",
    "eval_temperature": "rollout.val_kwargs.temperature",
    "eval.temperature": "rollout.val_kwargs.temperature",
    "vllm_tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "vllm.tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm_enable_sleep": "rollout.free_cache_engine",
    "vllm.enable_sleep": "rollout.free_cache_engine",
    "enforce_eager": "rollout.enforce_eager",
    "vllm.enforce_eager": "rollout.enforce_eager",
    "train_max_tokens_per_gpu": "actor.ppo_max_token_len_per_gpu",
    "train.max_tokens_per_gpu": "actor.ppo_max_token_len_per_gpu",
    "rollout_max_tokens_per_gpu": "actor.log_prob_max_token_len_per_gpu",
    "rollout.max_tokens_per_gpu": "actor.log_prob_max_token_len_per_gpu",
    "use_dynamic_batch": "actor.use_dynamic_bsz",
    "train.dynamic_batch_enable": "actor.use_dynamic_bsz",
    "micro_train_batch_size": "actor.ppo_micro_batch_size_per_gpu",
    "train.micro_batch_size": "actor.ppo_micro_batch_size_per_gpu",
    "max_epochs": "actor.ppo_epochs",
    "train.max_epochs": "actor.ppo_epochs",
    "num_episodes": "trainer.total_epochs",
    "train.num_episodes": "trainer.total_epochs",
    "max_norm": "actor.grad_clip",
    "l2": "actor.optim.weight_decay",
    "eps_clip": "actor.clip_ratio",
    "actor.eps_clip": "actor.clip_ratio",
    "dual_clip": "actor.clip_ratio_c",
    "actor.dual_clip": "actor.clip_ratio_c",
    "value_clip": "critic.cliprange_value",
    "critic.value_clip": "critic.cliprange_value",
    "lambd": "algorithm.lam",
    "algo.advantage.lambd": "algorithm.lam",
    "gamma": "algorithm.gamma",
    "algo.advantage.gamma": "algorithm.gamma",
    "advantage_estimator": "algorithm.adv_estimator",
    "algo.advantage.estimator": "algorithm.adv_estimator",
    "entropy_loss_coef": "actor.entropy_coeff",
    "actor.entropy_coef": "actor.entropy_coeff",
    "actor_learning_rate": "actor.optim.lr",
    "critic_learning_rate": "critic.optim.lr",
    "lr_warmup_ratio": "actor.optim.lr_warmup_steps_ratio",
    "adam_betas": "actor.optim.betas",
    "freezing_actor_steps": "trainer.critic_warmup",
    "critic.freezing_steps": "trainer.critic_warmup",
    "kl_target": "algorithm.kl_ctrl.target_kl",
    "algo.kl.target": "algorithm.kl_ctrl.target_kl",
    "kl_horizon": "algorithm.kl_ctrl.horizon",
    "algo.kl.horizon": "algorithm.kl_ctrl.horizon",
    "init_kl_coef": "algorithm.kl_ctrl.kl_coef",
    "algo.kl.init_coef": "algorithm.kl_ctrl.kl_coef",
    "kl_estimator": "algorithm.kl_penalty",
    "algo.kl.estimator": "algorithm.kl_penalty",
    "use_kl_loss": "actor.use_kl_loss",
    "algo.kl.use_loss": "actor.use_kl_loss",
    "algo.advantage.is_correction_level": "algorithm.rollout_correction.rollout_is",
    "algo.advantage.is_correction_threshold": "algorithm.rollout_correction.rollout_is_threshold",
    "vllm_is_truncated_threshold": "algorithm.rollout_correction.rollout_is_threshold",
    **{
        f"{section}.{theirs}": f"{section}.{ours}"
        for section in ("actor", "critic")
        for theirs, ours in {
            "adam.lr": "optim.lr",
            "adam.betas": "optim.betas",
            "adam.eps": "optim.eps",
            "adam.weight_decay": "optim.weight_decay",
            "lr_warmup_ratio": "optim.lr_warmup_steps_ratio",
            "lr_scheduler": "optim.lr_scheduler_type",
            "min_lr_ratio": "optim.min_lr_ratio",
            "max_norm": "grad_clip",
        }.items()
    },
    "gradient_checkpointing": "model.enable_gradient_checkpointing",
    "actor.gradient_checkpointing_enable": "model.enable_gradient_checkpointing",
    "attn_implementation": "model.attn_implementation",
    "ds.attn_implementation": "model.attn_implementation",
    "packing_samples": "model.use_remove_padding",
    "ds.packing_samples": "model.use_remove_padding",
    "adam_offload": "actor.fsdp.optimizer_offload",
    "ds.adam_offload": "actor.fsdp.optimizer_offload",
    "ring_attn_size": "actor.ulysses_sequence_parallel_size",
    "ds.ring_attn_size": "actor.ulysses_sequence_parallel_size",
    "ds_tensor_parallel_size": "actor.tensor_parallel_size",
    "ds.tensor_parallel_size": "actor.tensor_parallel_size",
    "save_steps": "trainer.save_freq",
    "ckpt.save_steps": "trainer.save_freq",
    "eval_steps": "trainer.test_freq",
    "eval.steps": "trainer.test_freq",
    "max_ckpt_num": "trainer.max_ckpt_to_keep",
    "ckpt.max_num": "trainer.max_ckpt_to_keep",
    "ckpt.best_metric_key": "trainer.keep_best",
    "ckpt_path": "trainer.default_local_dir",
    "ckpt.path": "trainer.default_local_dir",
    "train.seed": "trainer.seed",
    "wandb_project": "trainer.project_name",
    "logger.wandb.project": "trainer.project_name",
    "wandb_run_name": "trainer.experiment_name",
    "logger.wandb.run_name": "trainer.experiment_name",
    "train.full_determinism_enable": "trainer.deterministic",
    "lora_rank": "model.lora_rank",
    "ds.lora.rank": "model.lora_rank",
    "ds.lora.alpha": "model.lora_alpha",
    "ds.lora.dropout": "model.lora_dropout",
    "target_modules": "model.lora_target_modules",
    "ds.lora.target_modules": "model.lora_target_modules",
    "ds.use_liger_kernel": "model.use_liger",
    "aux_loss_coef": "actor.router_aux_loss_coef",
    "actor.aux_loss_coef": "actor.router_aux_loss_coef",
    "normalize_reward": "reward.normalize",
    "reward.normalize_enable": "reward.normalize",
    "overlong_buffer_len": "reward.overlong_buffer.len",
    "reward.overlong_buffer_len": "reward.overlong_buffer.len",
    "overlong_penalty_factor": "reward.overlong_buffer.penalty_factor",
    "reward.overlong_penalty_factor": "reward.overlong_buffer.penalty_factor",
    "dynamic_filtering": "algorithm.filter_groups.enable",
    "algo.dynamic_filtering_enable": "algorithm.filter_groups.enable",
    "vllm_generate_batch_size": "data.gen_batch_size",
    "rollout.vllm_generate_batch_size": "data.gen_batch_size",
}

_TOKENS = "it counts sequences; forward-only passes are cut by tokens here; remove it"
ADVICE = {
    "train_batch_size": "did you mean data.train_batch_size? (OpenRLHF's is "
    "actor.ppo_mini_batch_size x rollout.n)",
    "train.batch_size": "use actor.ppo_mini_batch_size, which counts prompts: divide by rollout.n",
    "micro_rollout_batch_size": _TOKENS,
    "rollout.micro_batch_size": _TOKENS,
    "eps_clip_low_high": "use actor.clip_ratio_low and actor.clip_ratio_high",
    "actor.eps_clip_low_high": "use actor.clip_ratio_low and actor.clip_ratio_high",
    "no_advantage_std_norm": "use algorithm.norm_adv_by_std_in_grpo=false",
    "algo.advantage.no_std_norm": "use algorithm.norm_adv_by_std_in_grpo=false",
    "enable_vllm_is_correction": "use algorithm.rollout_correction.rollout_is",
    "algo.advantage.is_correction_enable": "use algorithm.rollout_correction.rollout_is",
    "algo.advantage.is_correction_type": "use algorithm.rollout_correction.rollout_is, icepop or "
    "reject",
    "algo.advantage.is_correction_mode": "use algorithm.rollout_correction.rollout_is, or icepop "
    "there",
    "algo.advantage.is_correction_gating": "use algorithm.rollout_correction.icepop",
    "policy_loss_type": "use actor.policy_loss.loss_mode",
    "actor.policy_loss_type": "use actor.policy_loss.loss_mode",
    "label_key": "the ground truth is reward_model.ground_truth or the column ground_truth; "
    "remove it",
    "data.label_key": "the ground truth is reward_model.ground_truth or the column ground_truth; "
    "remove it",
    "apply_chat_template": "prompts that are lists of messages get the template; remove it",
    "data.apply_chat_template": "prompts that are lists of messages get the template; remove it",
    "input_template": "use model.custom_chat_template",
    "data.input_template": "use model.custom_chat_template",
    "remote_rm_url": "use reward.function.path: call it there",
    "reward.remote_url": "use reward.function.path: call it there",
    "agent_func_path": "use rollout.episode.path: ppo/episodes/README.md",
    "train.agent_func_path": "use rollout.episode.path: ppo/episodes/README.md",
    "max_len": "use data.max_prompt_length and data.max_response_length",
    "data.max_len": "use data.max_prompt_length and data.max_response_length",
    "lr_scheduler": "use actor.optim.lr_scheduler_type",
    "save_path": "python -m sharding.checkpoint export writes a folder; remove it",
    "ckpt.output_dir": "python -m sharding.checkpoint export writes a folder; remove it",
    "save_hf_ckpt": "use actor.checkpoint.save_contents with hf_model",
    "ckpt.save_hf": "use actor.checkpoint.save_contents with hf_model",
    "disable_ds_ckpt": "use actor.checkpoint.save_contents",
    "ckpt.disable_ds": "use actor.checkpoint.save_contents",
    "save_value_network": "use critic.checkpoint.save_contents with hf_model",
    "critic.save_value_network": "use critic.checkpoint.save_contents with hf_model",
    "load_checkpoint": "use trainer.resume_mode",
    "ckpt.load_enable": "use trainer.resume_mode",
    "flash_attn": "use model.attn_implementation",
    "bf16": "use actor.fsdp.mixed_precision.param_dtype=bfloat16, the default",
    "ds.param_dtype": "use actor.fsdp.mixed_precision.param_dtype",
    "grad_accum_dtype": "use actor.fsdp.mixed_precision.reduce_dtype",
    "ds.grad_accum_dtype": "use actor.fsdp.mixed_precision.reduce_dtype",
    "zero_stage": "use actor.fsdp.reshard_after_forward (3 is true, 2 is false)",
    "ds.zero_stage": "use actor.fsdp.reshard_after_forward (3 is true, 2 is false)",
    "zpg": "use actor.fsdp.fsdp_size",
    "ds.zpg": "use actor.fsdp.fsdp_size",
    "use_wandb": "use trainer.logger",
    "logger.wandb.key": "use trainer.logger",
    "use_tensorboard": "use trainer.logger",
    "logger.tensorboard_dir": "use trainer.logger: tensorboard is in the run folder",
    "ref_reward_offload": "ref and reward model rest on the host always; remove it",
    "ref.offload": "the reference rests on the host while it is idle, always; remove it",
    "reward.offload": "the reward model rests on the host while it is idle, always; remove it",
    "vllm.enable_prefix_caching": "use rollout.engine_kwargs.disable_radix_cache",
    "enable_prefix_caching": "use rollout.engine_kwargs.disable_radix_cache",
    "algo.dynamic_filtering_std_threshold": "use algorithm.filter_groups: groups whose scores are "
    "equal are left out",
    "algo.dynamic_filtering_range": "use algorithm.filter_groups",
    "dynamic_filtering_reward_range": "use algorithm.filter_groups",
    "train.partial_rollout_enable": "use rollout.partial",
}

_NOT_NEEDED = {
    "torchrun starts the ranks, and all models share the devices": "ref_num_nodes "
    "ref_num_gpus_per_node reward_num_nodes reward_num_gpus_per_node actor_num_nodes "
    "actor_num_gpus_per_node critic_num_nodes critic_num_gpus_per_node colocate_actor_ref "
    "colocate_critic_reward colocate_all_models ref.num_nodes ref.num_gpus_per_node "
    "reward.num_nodes reward.num_gpus_per_node actor.num_nodes actor.num_gpus_per_node "
    "critic.num_nodes critic.num_gpus_per_node train.colocate_actor_ref "
    "train.colocate_critic_reward train.colocate_all vllm_num_engines vllm.num_engines "
    "rollout_tasks_per_gpu actor_init_on_gpu",
    "weights go from FSDP shards to the engine directly": "vllm_sync_backend vllm.sync_backend "
    "vllm_sync_with_ray vllm.sync_with_ray",
    "it is a setting of DeepSpeed": "ds.use_universal_ckpt use_ds_universal_ckpt deepcompile "
    "ds.deepcompile overlap_comm ds.overlap_comm deepspeed_enable_sleep ds.enable_sleep "
    "gradient_checkpointing_use_reentrant actor.gradient_checkpointing_reentrant "
    "ds.experts_implementation ds.ring_attn_head_stride ring_head_stride",
    "every iteration is logged": "logger.logging_steps",
    "AdamW is the only optimizer": " ".join(
        f"{section}.muon.{name}"
        for section in ("actor", "critic")
        for name in ("lr", "momentum", "ns_steps", "nesterov", "no_nesterov", "weight_decay")
    ),
    "the run folder has all of it": "wandb_org wandb_group logger.wandb.org logger.wandb.group",
    "prompts are read once, by every rank": "data.dataloader_num_workers "
    "data.disable_fast_tokenizer disable_fast_tokenizer prompt_split data.prompt_split eval_split "
    "eval.split data.image_key data.max_images_per_prompt",
    "a critic's head is found by its shape": "value_head_prefix ds.value_head_prefix",
    "old checkpoints are deleted by number": "max_ckpt_mem ckpt.max_mem",
    "there is no pretraining loss": "ptx_coef pretrain_data pretrain_data_probs",
    "use HF's names": "use_ms",
}

_NOT_BUILT = {
    "training on asynchronous rollouts": "async_train async_queue_size train.async_enable "
    "train.async_queue_size",
    "an average of the weights": "enable_ema ema_beta train.enable_ema train.ema_beta",
    "4-bit loading": "load_in_4bit ds.load_in_4bit",
    "clipping of rewards": "reward_clip_range reward.clip_range reward.stop_properly_penalty_coef",
    "the unbiased gradient of KL": "algo.kl.unbiased_gradient",
    "vision": "actor.freeze_visual_encoder",
}

ADVICE |= {
    name: f"{why}; remove it" for why, names in _NOT_NEEDED.items() for name in names.split()
}
ADVICE |= dict.fromkeys(
    ("prompt_data_probs", "data.prompt_probs"), "use data.mix, weights by data source or file"
)
ADVICE |= {
    name: f"{what} is not built; remove it"
    for what, names in _NOT_BUILT.items()
    for name in names.split()
}
