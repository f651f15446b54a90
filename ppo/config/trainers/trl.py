"""TRL's names (GRPOConfig, RLOOConfig and PPOConfig up to 1.16) and what replaces them.

With those of transformers' TrainingArguments, which they inherit. Pure data.
"""

from __future__ import annotations

# a name, wherever it stands -> the key that holds the same value here
SAME = {
    "learning_rate": "actor.optim.lr",
    "weight_decay": "actor.optim.weight_decay",
    "adam_epsilon": "actor.optim.eps",
    "lr_scheduler_type": "actor.optim.lr_scheduler_type",
    "warmup_steps": "actor.optim.lr_warmup_steps",
    "warmup_ratio": "actor.optim.lr_warmup_steps_ratio",
    "max_grad_norm": "actor.grad_clip",
    "num_train_epochs": "trainer.total_epochs",
    "max_steps": "trainer.total_training_steps",
    "save_total_limit": "trainer.max_ckpt_to_keep",
    "metric_for_best_model": "trainer.keep_best",
    "output_dir": "trainer.default_local_dir",
    "run_name": "trainer.experiment_name",
    "project": "trainer.project_name",
    "resume_from_checkpoint": "trainer.resume_mode",
    "ddp_timeout": "trainer.comm_timeout_s",
    "gradient_checkpointing": "model.enable_gradient_checkpointing",
    "attn_implementation": "model.attn_implementation",
    "trust_remote_code": "model.trust_remote_code",
    "model_name_or_path": "model.path",
    "reward_model_path": "reward.model.path",
    "value_model_path": "critic.model.path",
    "dataset_name": "data.train_files",
    "max_prompt_length": "data.max_prompt_length",
    "max_completion_length": "data.max_response_length",
    "response_length": "data.max_response_length",
    "shuffle_dataset": "data.shuffle",
    "chat_template_kwargs": "data.apply_chat_template_kwargs",
    "num_generations": "rollout.n",
    "rloo_k": "rollout.n",
    "num_generations_eval": "rollout.val_kwargs.n",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "temperature": "rollout.temperature",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "vllm_max_model_length": "rollout.max_model_len",
    "vllm_enable_sleep_mode": "rollout.free_cache_engine",
    "vllm_server_timeout": "rollout.timeout_s",
    "num_iterations": "actor.ppo_epochs",
    "num_ppo_epochs": "actor.ppo_epochs",
    "epsilon": "actor.clip_ratio",
    "cliprange": "actor.clip_ratio",
    "epsilon_high": "actor.clip_ratio_high",
    "delta": "actor.clip_ratio_c",
    "sapo_temperature_pos": "actor.tau_pos",
    "sapo_temperature_neg": "actor.tau_neg",
    "cliprange_value": "critic.cliprange_value",
    "entropy_coef": "actor.entropy_coeff",
    "kl_coef": "algorithm.kl_ctrl.kl_coef",
    "kl_estimator": "algorithm.kl_penalty",
    "gamma": "algorithm.gamma",
    "lam": "algorithm.lam",
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
    "vllm_importance_sampling_cap": "algorithm.rollout_correction.rollout_is_threshold",
    "vllm_importance_sampling_clip_max": "algorithm.rollout_correction.rollout_is_threshold",
    "num_completions_to_print": "trainer.log_val_generations",
    "seed": "trainer.seed",
    "data_seed": "data.seed",
    "lora_r": "model.lora_rank",
    "lora_alpha": "model.lora_alpha",
    "lora_dropout": "model.lora_dropout",
    "lora_target_modules": "model.lora_target_modules",
    "use_liger_kernel": "model.use_liger",
    "router_aux_loss_coef": "actor.router_aux_loss_coef",
}

ADVICE = {
    "beta": "use actor.use_kl_loss=true and actor.kl_loss_coef; 0 is actor.use_kl_loss=false",
    "vf_coef": "the critic has its own optimizer: use critic.optim.lr",
    "per_device_train_batch_size": "use actor.ppo_mini_batch_size (prompts of an optimizer step) "
    "and actor.ppo_max_token_len_per_gpu (memory)",
    "per_device_eval_batch_size": "use data.val_batch_size",
    "gradient_accumulation_steps": "it follows from actor.ppo_mini_batch_size; remove it",
    "generation_batch_size": "use data.train_batch_size, which counts prompts",
    "steps_per_generation": "it is data.train_batch_size / actor.ppo_mini_batch_size; remove it",
    "num_mini_batches": "it is data.train_batch_size / actor.ppo_mini_batch_size; remove it",
    "local_rollout_forward_batch_size": "use actor.log_prob_max_token_len_per_gpu, in tokens",
    "total_episodes": "use trainer.total_training_steps or trainer.total_epochs",
    "loss_type": "use actor.loss_agg_mode: seq-mean-token-mean for grpo, token-mean for bnpo and "
    "dapo, seq-mean-token-sum-norm for dr_grpo; actor.policy_loss.loss_mode for cispo and sapo",
    "importance_sampling_level": "use actor.policy_loss.loss_mode=gspo for sequence",
    "vllm_importance_sampling_correction": "use algorithm.rollout_correction.rollout_is",
    "vllm_importance_sampling_mode": "use algorithm.rollout_correction.rollout_is, or icepop there",
    "vllm_importance_sampling_clip_min": "use algorithm.rollout_correction.icepop",
    "reward_weights": "use reward.function.weights, or reward.weights beside a reward model",
    "reward_funcs": "use reward.function.path (several: a list) with reward.function.style=trl",
    "adam_beta1": "use actor.optim.betas",
    "adam_beta2": "use actor.optim.betas",
    "bf16": "use actor.fsdp.mixed_precision.param_dtype=bfloat16, the default",
    "fp16": "use actor.fsdp.mixed_precision.param_dtype",
    "use_cpu": "use trainer.device=cpu",
    "save_steps": "use trainer.save_freq, in iterations",
    "save_strategy": "use trainer.save_freq; 0 = only at the end",
    "eval_steps": "use trainer.test_freq, in iterations",
    "eval_strategy": "use trainer.test_freq; 0 = only at the end",
    "eval_on_start": "use trainer.val_before_train",
    "do_eval": "use data.val_files",
    "do_train": "use trainer.val_only",
    "report_to": "use trainer.logger",
    "log_completions": "use trainer.log_val_generations",
    "load_best_model_at_end": "use trainer.keep_best",
    "greater_is_better": "trainer.keep_best takes the highest value, and with - before the metric "
    "the lowest; remove it",
    "model_init_kwargs": "use model.dtype, model.attn_implementation, model.override_config",
    "generation_kwargs": "use rollout.temperature, top_p, top_k, stop",
    "use_vllm": "use rollout.engine",
    "use_transformers_paged": "use rollout.engine",
    "use_transformers_continuous_batching": "use rollout.engine",
    "deepspeed": "FSDP2 is the only strategy: use actor.fsdp",
    "fsdp": "use actor.fsdp.sharding_strategy and fsdp_size",
    "fsdp_config": "use actor.fsdp",
    "parallelism_config": "use actor.ulysses_sequence_parallel_size",
    "use_peft": "use model.lora_rank",
    "use_bias_correction_kl": "use actor.kl_loss_type=low_var_kl+, the same gradient where the "
    "ratio is 1",
    "reward_model_name_or_path": "use reward.model.path",
    "lora_modules_to_save": "what is trained besides the adapters is the critic's head; remove it",
    "modules_to_save": "what is trained besides the adapters is the critic's head; remove it",
    "stop_token_id": "use rollout.stop, for texts that end a response",
    "torch_compile": "use model.compile",
    "dtype": "use model.dtype",
    "torch_dtype": "use model.dtype",
    "sft_model_path": "use model.path",
    "stop_token": "use rollout.stop; the end-of-sequence token always ends a response",
    "full_determinism": "use trainer.deterministic",
    "logging_steps": "every iteration is logged; remove it",
}

_NOT_NEEDED = {
    "nothing is dropped out unless the model's config says so": "disable_dropout",
    "losses are in float32 always": "cast_lm_head_to_fp32",
    "all columns are kept": "remove_unused_columns",
    "rows are packed": "pad_to_multiple_of group_by_length length_column_name",
    "generation is a call in the training program": "vllm_mode vllm_model_impl "
    "vllm_server_base_url vllm_server_host vllm_server_port vllm_group_port "
    "ds3_gather_for_generation cache_implementation transformers_continuous_batching_config",
    "memory follows from the token budgets": "torch_empty_cache_steps auto_find_batch_size",
    "AdamW is the only optimizer": "optim optim_args optim_target_modules lr_scheduler_kwargs",
    "data sets become files first": "dataset_config "
    "dataset_train_split dataset_test_split dataset_streaming",
    "every iteration validates and logs samples of its own": "num_sample_generations",
    "there is one set of adapters, and the reference is the model without": "model_adapter_name "
    "ref_adapter_name lora_task_type inference_mode",
    "it is a debugging option of DDP or Trainer": "ignore_bias_buffers "
    "gradient_checkpointing_use_reentrant",
    "the run folder has all of it": "logging_dir logging_strategy logging_first_step log_level "
    "log_level_replica log_on_each_node logging_nan_inf_filter disable_tqdm "
    "include_num_input_tokens_seen include_tokens_per_second log_multimodal log_unique_prompts "
    "log_completions_hub_repo trackio_space_id trackio_bucket_id trackio_static_space_id",
    "nothing is sent to a hub: python -m sharding.checkpoint export writes a folder": "push_to_hub "
    "hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision",
    "torchrun and FSDP2 decide it": "local_rank ddp_backend ddp_find_unused_parameters "
    "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph dataloader_drop_last "
    "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
    "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order "
    "train_sampling_strategy accelerator_config average_tokens_across_devices split_batches "
    "half_precision_backend tpu_num_cores debug past_index tp_size",
    "a checkpoint holds what a resume needs": "save_only_model save_on_each_node "
    "save_safetensors restore_callback_states_from_checkpoint ignore_data_skip "
    "enable_jit_checkpoint overwrite_output_dir",
    "there is no such Trainer here": "prediction_loss_only eval_accumulation_steps eval_delay "
    "eval_do_concat_batches eval_use_gather_object batch_eval_metrics include_for_metrics "
    "include_inputs_for_metrics label_names label_smoothing_factor neftune_noise_alpha "
    "use_legacy_prediction_loop do_predict jit_mode_eval use_ipex use_cache skip_memory_metrics "
    "fp16_full_eval bf16_full_eval "
    "tf32 torchdynamo torch_compile_backend torch_compile_mode gradient_checkpointing_kwargs "
    "liger_kernel_config dataset_num_proc exp_name kl_ctl world_size batch_size",
}

_NOT_BUILT = {
    "a penalty of repetition, which would change what log-probs are of,": "repetition_penalty",
    "min_p": "min_p",
    "a scale of adapters by the root of their rank, or DoRA,": "use_rslora use_dora",
    "another start of adapters than PEFT's own": "init_lora_weights",
    "quantised loading": "load_in_8bit bnb_4bit_quant_type use_bnb_nested_quant",
    "a branch or commit of the hub (download it to a folder)": "model_revision",
    "structured output": "vllm_structured_outputs_regex vllm_guided_decoding_regex",
    "the loss of VESPO": "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg",
    "another sum of rewards than the weighted one": "multi_objective_aggregation",
    "leaving out responses cut by length": "mask_truncated_completions missing_eos_penalty",
    "a reference that follows the actor": "sync_ref_model ref_model_mixup_alpha "
    "ref_model_sync_steps",
    "a loss on the tokens of high entropy alone": "top_entropy_quantile",
    "a coefficient of entropy that adapts": "use_adaptive_entropy entropy_coef_min "
    "entropy_coef_max entropy_coef_delta entropy_target",
    "a mask of off-policy sequences": "off_policy_mask_threshold",
    "normalising of rewards": "whiten_rewards reward_clip_range normalize_advantage "
    "normalize_advantages token_level_kl",
}

ADVICE |= {
    name: f"{why}; remove it" for why, names in _NOT_NEEDED.items() for name in names.split()
}
ADVICE |= {
    name: f"{what} is not built; remove it"
    for what, names in _NOT_BUILT.items()
    for name in names.split()
}
ADVICE |= {
    "max_tool_calling_iterations": "use rollout.episode.max_turns, one more: the last calls none",
    "tools": "use rollout.episode.path, a file with an episode that hands them to the policy: "
    "ppo/episodes/README.md",
    "environment_factory": "use rollout.episode.path for the file and rollout.episode.name for the "
    "class, which runs unchanged: ppo/episodes/README.md",
}
