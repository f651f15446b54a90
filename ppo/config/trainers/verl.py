"""verl's keys (its ppo_trainer.yaml, releases 0.3 to 0.9) and what replaces them.

Paths are written without verl's `actor_rollout_ref.`. Pure data: it must not know how it is read.
"""

from __future__ import annotations

NO_RAY = "there is no Ray here: torchrun starts the ranks; remove it"
COLOCATED = "actor, rollout and ref always share the devices; remove it"
TOKENS = (
    "it counts sequences; here forward-only passes are cut by tokens, which default to twice "
    "actor.ppo_max_token_len_per_gpu; remove it"
)

EPISODES = (
    "use rollout.episode.path, a file with tools (verl's @function_tool), an environment class or "
    "an episode: ppo/episodes/README.md"
)

REINFORCE = "with bypass_old_logprob, actor.policy_loss.loss_mode=gpg is the loss without a ratio"

# a path that is this, or begins like this where it ends with a dot, is written like that
RENAMED = {
    "actor_rollout_ref.": "",
    "actor.fsdp_config.": "actor.fsdp.",
    "ref.fsdp_config.": "ref.fsdp.",
    "critic.model.fsdp_config.": "critic.fsdp.",
    "critic.fsdp_config.": "critic.fsdp.",
    "reward_model.model.fsdp_config.": "reward.model.fsdp.",
    "actor.ppo_micro_batch_size": "actor.ppo_micro_batch_size_per_gpu",
    "actor.optim.clip_grad": "actor.grad_clip",
    "actor.optim.warmup_style": "actor.optim.lr_scheduler_type",
    "actor.fsdp.model_dtype": "model.dtype",
    "actor.fsdp.dtype": "actor.fsdp.mixed_precision.param_dtype",
    "actor.fsdp.ulysses_sequence_parallel_size": "actor.ulysses_sequence_parallel_size",
    "actor.checkpoint.contents": "actor.checkpoint.save_contents",
    "critic.checkpoint.contents": "critic.checkpoint.save_contents",
    "critic.model.use_rmpad": "model.use_remove_padding",
    "actor.use_remove_padding": "model.use_remove_padding",
    "ref.log_prob_max_token_len": "ref.log_prob_max_token_len_per_gpu",
    "ref.fsdp.dtype": "ref.fsdp.mixed_precision.param_dtype",
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_max_token_len_per_gpu": "critic.ppo_max_token_len_per_gpu",
    "critic.optim.clip_grad": "critic.grad_clip",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "critic.fsdp.dtype": "critic.fsdp.mixed_precision.param_dtype",
    "critic.cliprange": "critic.cliprange_value",
    "rollout.prompt_length": "data.max_prompt_length",
    "rollout.response_length": "data.max_response_length",
    "rollout.log_prob_max_token_len_per_gpu": "actor.log_prob_max_token_len_per_gpu",
    "rollout.tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "rollout.update_weights_bucket_megabytes": "rollout.reshard_bucket_mib",
    "rollout.checkpoint_engine.update_weights_bucket_megabytes": "rollout.reshard_bucket_mib",
    "rollout.full_determinism": "trainer.deterministic",
    "rollout.engine_kwargs.sglang.": "rollout.engine_kwargs.",
    "rollout.multi_turn.max_assistant_turns": "rollout.episode.max_turns",
    "rollout.multi_turn.max_turns": "rollout.episode.max_turns",
    "rollout.multi_turn.function_tool_path": "rollout.episode.path",
    "data.function_tool_path": "rollout.episode.path",
    "model.use_rmpad": "model.use_remove_padding",
    "model.target_modules": "model.lora_target_modules",
    "model.exclude_modules": "model.lora_exclude_modules",
    "critic.model.target_modules": "critic.model.lora_target_modules",
    "critic.model.exclude_modules": "critic.model.lora_exclude_modules",
    "model.lora.rank": "model.lora_rank",
    "model.lora.alpha": "model.lora_alpha",
    "model.lora.dropout": "model.lora_dropout",
    "model.use_torch_compile": "model.compile",
    "data.tokenizer": "model.tokenizer_path",
    "data.trust_remote_code": "model.trust_remote_code",
    "algorithm.rollout_correction.bypass_mode": "algorithm.rollout_correction.bypass_old_logprob",
    "nccl_timeout": "trainer.comm_timeout_s",
    "trainer.critic_warmup_steps": "trainer.critic_warmup",
    "trainer.resume_from_path": "trainer.resume_mode",
    "trainer.max_actor_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "trainer.max_critic_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "trainer.val_generations_to_log_to_wandb": "trainer.log_val_generations",
    "custom_reward_function.overlong_buffer.": "reward.overlong_buffer.",
    "custom_reward_function.reward_kwargs.": "reward.function.kwargs.",
    "custom_reward_function.": "reward.function.",
    "reward.custom_reward_function.": "reward.function.",
    "reward.reward_model.enable": "reward.model.enable",
    "reward.reward_model.model_path": "reward.model.path",
    "reward.reward_manager.name": "reward.manager",
    "reward_model.enable": "reward.model.enable",
    "reward_model.model.path": "reward.model.path",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.forward_max_token_len_per_gpu": "reward.model.max_token_len_per_gpu",
    "reward_model.reward_manager": "reward.manager",
    "reward_model.overlong_buffer.": "reward.overlong_buffer.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.": "reward.overlong_buffer.",
    "reward.reward_kwargs.overlong_buffer_cfg.": "reward.overlong_buffer.",
    **{
        f"critic.model.{name}": f"model.{name}"
        for name in (
            *("tokenizer_path", "trust_remote_code", "override_config", "custom_chat_template"),
            *("enable_gradient_checkpointing", "enable_activation_offload", "use_remove_padding"),
            "use_liger",
        )
    },
}

# of the key, or of all keys inside
ADVICE = {
    "actor_rollout_ref": "sections have no prefix here: actor, ref, rollout, model",
    "trainer.nnodes": "torchrun --nnodes says it (for --check: check.nnodes); remove it",
    "trainer.n_gpus_per_node": "torchrun --nproc_per_node says it (for --check: "
    "check.nproc_per_node); remove it",
    "rollout.name": "use rollout.engine",
    "rollout.do_sample": "use rollout.temperature (0 = greedy)",
    "rollout.val_kwargs.do_sample": "use rollout.val_kwargs.temperature (0 = greedy)",
    "rollout.engine_kwargs.vllm": "vLLM is not built in; rollout.engine_kwargs are sglang.Engine's",
    "rollout.engine_kwargs.trtllm": "TensorRT is not built in; rollout.engine_kwargs are "
    "sglang.Engine's",
    "rollout.log_prob_micro_batch_size": TOKENS,
    "rollout.log_prob_micro_batch_size_per_gpu": TOKENS,
    "ref.log_prob_micro_batch_size": TOKENS,
    "ref.log_prob_micro_batch_size_per_gpu": TOKENS,
    "critic.forward_micro_batch_size": TOKENS,
    "critic.forward_micro_batch_size_per_gpu": TOKENS,
    "reward_model.micro_batch_size": TOKENS,
    "reward_model.micro_batch_size_per_gpu": TOKENS,
    "rollout.layered_summon": "rollout.reshard_bucket_mib bounds the memory; remove it",
    "rollout.layered_summon_param": "rollout.reshard_bucket_mib bounds the memory; remove it",
    "rollout.enable_prefix_caching": "use rollout.engine_kwargs.disable_radix_cache",
    "rollout.enable_chunked_prefill": "use rollout.engine_kwargs.chunked_prefill_size",
    "rollout.cudagraph_capture_sizes": "use rollout.engine_kwargs.cuda_graph_bs",
    "rollout.scheduling_policy": "use rollout.engine_kwargs.schedule_policy",
    "rollout.quantization": "use rollout.engine_kwargs.quantization",
    **dict.fromkeys(("rollout.multi_turn", "rollout.agent", "data.tool_config_path"), EPISODES),
    "rollout.multi_turn.max_user_turns": "use rollout.episode.max_turns, which counts the policy's",
    "rollout.multi_turn.max_tool_response_length": "it counts characters; use "
    "rollout.episode.max_observation_tokens",
    "rollout.multi_turn.tool_response_truncate_side": "what is cut is the end; remove it",
    "rollout.multi_turn.max_parallel_calls": "calls of a turn run one after the other; remove it",
    "rollout.multi_turn.tokenization_sanity_check_mode": "what was sampled is never encoded again; "
    "remove it",
    "rollout.multi_turn.use_inference_chat_template": "there is one chat template; remove it",
    "rollout.limit_images": "vision is not built in; remove it",
    "rollout.checkpoint_engine": "weights go from FSDP shards to the engine directly; "
    "rollout.reshard_bucket_mib is their buffer; remove it",
    "actor.use_dual_clip": "the dual clip is always on, with bound actor.clip_ratio_c (a large "
    "value switches it off)",
    "actor.loss_scale_factor": "actor.loss_agg_mode seq-mean-token-sum-norm divides by "
    "data.max_response_length; remove it",
    "critic.loss_scale_factor": "critic.loss_agg_mode seq-mean-token-sum-norm divides by "
    "data.max_response_length; remove it",
    "actor.checkpoint.load_contents": "what actor.checkpoint.save_contents names is loaded; "
    "remove it",
    "critic.checkpoint.load_contents": "what critic.checkpoint.save_contents names is loaded; "
    "remove it",
    "actor.checkpoint.async_save": "use trainer.async_save",
    "critic.checkpoint.async_save": "use trainer.async_save",
    "actor.optim.total_training_steps": "use trainer.total_training_steps",
    "critic.optim.total_training_steps": "use trainer.total_training_steps",
    "actor.optim.override_optimizer_config": "use betas, eps and weight_decay of actor.optim",
    "critic.optim.override_optimizer_config": "use betas, eps and weight_decay of critic.optim",
    "ref.ulysses_sequence_parallel_size": "all models share "
    "actor.ulysses_sequence_parallel_size; remove it",
    "data.sampler": "use data.mix for shares of data sources, data.difficulty for a curriculum",
    "model.hf_config_path": "use model.override_config",
    **dict.fromkeys(
        (
            "algorithm.rollout_correction.rollout_rs",
            "algorithm.rollout_correction.rollout_rs_threshold",
            "algorithm.rollout_correction.rollout_rs_threshold_lower",
        ),
        "use algorithm.rollout_correction.reject: {seq_mean_k1: [0.999, 1.001]}; earlier names: "
        "token is token_k1, sequence seq_sum_k1, geometric seq_mean_k1",
    ),
    "algorithm.rollout_correction.loss_type": REINFORCE,
    "algorithm.rollout_correction.use_policy_gradient": REINFORCE,
    "algorithm.rollout_correction.debug_rollout_actor_probs": "training/rollout_probs_diff_mean is "
    "always logged; remove it",
    "algorithm.rollout_is_threshold": "use algorithm.rollout_correction.rollout_is_threshold",
    "algorithm.rollout_is": "use algorithm.rollout_correction.rollout_is",
    "algorithm.filter_groups.max_inflight_gen_batches": "rounds are generated one after the other; "
    "remove it",
    "reward.overlong_buffer.enable": "use reward.manager=dapo",
    "reward.overlong_buffer.log": "reward/overlong_penalty is always logged; remove it",
    "trainer.rollout_data_dir": "samples are written into the run folder; remove it",
    "trainer.validation_data_dir": "samples are written into the run folder; remove it",
    "trainer.default_hdfs_dir": "checkpoints are written to trainer.default_local_dir alone: use a "
    "folder that all nodes see",
    "trainer.del_local_ckpt_after_load": "use trainer.max_ckpt_to_keep",
    "reward_model.use_reward_loop": "rewards are scored in processes always; remove it",
    "distillation": "use algorithm.adv_estimator=opd and ref.model.path",
    "custom_reward_function": "use reward.function",
    "reward_model": "use reward.model",
    "reward.reward_model": "use reward.model",
    "reward.reward_manager": "use reward.function for a rule of your own",
    "sandbox_fusion": "call it from reward.function",
    "reward.sandbox_fusion": "call it from reward.function",
    "reward_model.sandbox_fusion": "call it from reward.function",
}

# why nobody needs the keys
_NOT_NEEDED = {
    NO_RAY.removesuffix("; remove it"): "ray_kwargs ray_init global_pool resource_pool "
    "resource_pool_spec trainer.ray_wait_register_center_timeout transfer_queue "
    "reward.reward_model.enable_resource_pool reward_model.enable_resource_pool",
    COLOCATED.removesuffix("; remove it"): "hybrid_engine rollout.nnodes rollout.n_gpus_per_node "
    "rollout.disaggregation trainer.use_v1 trainer.v1 trainer.use_legacy_worker_impl",
    "generation is a call in the training program": "rollout.mode rollout.agent.num_workers "
    "rollout.agent.custom_async_server rollout.router_config_path rollout.skip_tokenizer_init",
    "weights always come from the trainer": "rollout.load_format",
    "responses are generated, never read from a dump": "rollout.skip_rollout rollout.skip_dump_dir",
    "the engine's log-probs are always kept": "rollout.calculate_log_probs rollout.logprobs_mode",
    "forward-only passes are always cut by tokens": "rollout.log_prob_use_dynamic_bsz "
    "ref.log_prob_use_dynamic_bsz reward_model.use_dynamic_bsz",
    "FSDP2 is the only strategy": "actor.strategy critic.strategy ref.strategy "
    "reward_model.strategy actor.fsdp.strategy critic.fsdp.strategy ref.fsdp.strategy",
    "AdamW is the only optimizer": "actor.optim.optimizer actor.optim.optimizer_impl "
    "critic.optim.optimizer critic.optim.optimizer_impl",
    "a cosine is half a period": "actor.optim.num_cycles critic.optim.num_cycles",
    "the schedule counts iterations from 1": "actor.optim.zero_indexed_step "
    "critic.optim.zero_indexed_step",
    "log-probs and entropy are always computed in blocks": "use_fused_kernels "
    "actor.use_fused_kernels model.use_fused_kernels model.fused_kernel_options "
    "critic.model.use_fused_kernels critic.model.fused_kernel_options "
    "actor.entropy_from_logits_with_chunking ref.entropy_from_logits_with_chunking "
    "actor.entropy_from_logits_chunk_size ref.entropy_from_logits_chunk_size "
    "actor.entropy_checkpointing ref.entropy_checkpointing",
    "entropy is always logged": "actor.calculate_entropy actor.calculate_sum_pi_squared",
    "rows are packed as they are": "actor.pad_to_length ref.pad_to_length actor.use_prefix_grouper",
    "trainer.seed decides": "actor.data_loader_seed critic.data_loader_seed rollout.seed "
    "actor.fsdp.seed critic.fsdp.seed ref.fsdp.seed",
    "conversations are never cut": "reward_model.max_length",
    "its own tokenizer reads the conversation": "reward_model.model.input_tokenizer",
    "it follows model.use_remove_padding": "reward_model.model.use_remove_padding "
    "reward_model.model.use_rmpad",
    "gradients are on the host with offload_policy, else on the device": "actor.fsdp.grad_offload "
    "critic.fsdp.grad_offload ref.fsdp.grad_offload",
    "it is data.max_response_length": "reward_model.reward_kwargs.max_resp_len "
    "reward.reward_kwargs.max_resp_len",
    "it follows model.trust_remote_code": "reward_model.model.trust_remote_code",
    "it is actor.ulysses_sequence_parallel_size": "reward_model.ulysses_sequence_parallel_size "
    "critic.fsdp.ulysses_sequence_parallel_size ref.fsdp.ulysses_sequence_parallel_size",
    "the reward model is sharded like the reference": "reward.reward_model.rollout "
    "reward.reward_model.n_gpus_per_node reward.reward_model.nnodes reward_model.rollout "
    "reward_model.n_gpus_per_node reward_model.nnodes",
    "rewards are scored in processes of their own": "reward_model.launch_reward_fn_async "
    "reward.launch_reward_fn_async",
    "files are read where they are": "data.use_shm model.use_shm critic.model.use_shm",
    "prompts are read once, by one rank of a node": "data.dataloader_num_workers "
    "data.filter_overlong_prompts_workers data.datagen",
    "validation takes the rows as they stand": "data.validation_shuffle",
    "the dataset gives all of it": "data.return_raw_input_ids data.return_raw_chat "
    "data.return_full_prompt data.return_multi_modal_inputs",
    "samples and metrics are in the run folder": "rollout.trace rollout.prometheus "
    "rollout.disable_log_stats rollout.moe_load_balance_metrics_interval",
    "weights and KV cache wake one after the other": "rollout.multi_stage_wake_up",
    "a checkpoint is complete or not there": "actor.checkpoint.strict critic.checkpoint.strict",
    "trainer.max_wall_time saves in time": "trainer.esi_redundant_time",
    "import it in reward.function or data.custom_cls": "model.external_lib "
    "critic.model.external_lib trainer.checkpoint_callback_class",
    "all of the language model is trained": "actor.freeze_vision_tower",
    "it is a setting of Megatron": "actor.megatron critic.megatron ref.megatron "
    "reward_model.megatron",
    "it has no counterpart": "actor.fsdp.turbo_config critic.fsdp.turbo_config "
    "ref.fsdp.turbo_config "
    "skip rollout.rollout_n critic.model.hf_config_path",
}

_NOT_BUILT = {
    "quantised training": "actor.qat rollout.qat rollout.quantization_config_file "
    "actor.fsdp.qat critic.fsdp.qat ref.fsdp.qat",
    "vision": "data.image_key data.video_key data.audio_key data.image_patch_size "
    "data.mm_processor_kwargs",
    "multi-token prediction": "model.mtp critic.model.mtp rollout.mtp",
    "replay of the router's choices": "rollout.enable_rollout_routing_replay",
    "sampling more than is needed": "rollout.over_sample_rate",
    "parallelism of the engine besides rollout.tensor_model_parallel_size": "rollout"
    ".data_parallel_size rollout.expert_parallel_size rollout.pipeline_model_parallel_size",
    "reading adapters": "model.lora_adapter_path model.lora critic.model.lora_adapter_path "
    "critic.model.lora",
    "tiling of the MLP": "model.tiled_mlp critic.model.tiled_mlp",
    "preference-filtered PPO": "algorithm.use_pf_ppo algorithm.pf_ppo",
    "validation with top_k": "rollout.val_kwargs.top_k",
    "normalising weights over a batch": "algorithm.rollout_correction.rollout_is_batch_normalize",
}

ADVICE |= {
    path: f"{why}; remove it" for why, paths in _NOT_NEEDED.items() for path in paths.split()
}
ADVICE |= {
    path: f"{what} is not built; remove it"
    for what, paths in _NOT_BUILT.items()
    for path in paths.split()
}

_PROFILERS = "actor critic ref rollout reward_model"
ADVICE |= {f"{name}.profiler": "use trainer.profile_steps" for name in _PROFILERS.split()}
ADVICE["global_profiler"] = "use trainer.profile_steps"

# names of verl that mean the same wherever they stand
ANYWHERE = {
    "_target_": "sections have their classes here; remove it",
    "rollout_n": "use rollout.n",
    "transformer_layer_cls_to_wrap": "decoder layers are found by themselves; remove it",
    "use_orig_params": "FSDP2 always keeps them; remove it",
    "limit_all_gathers": "FSDP2 limits them by itself; remove it",
    "use_torch_compile": "use model.compile=layers, or remove it",
    "full_determinism": "use trainer.deterministic",
    "model_dtype": "use model.dtype",
    "forward_only": "it follows from the model; remove it",
    "use_no_sync_for_gradient_accumulation": "gradients are reduced by FSDP2; remove it",
    "pad_to_length": "rows are packed as they are; remove it",
    "pad_to_length_bucket": "rows are packed as they are; remove it",
    "entropy_from_logits_with_chunking": "entropy is computed in blocks always; remove it",
    "entropy_from_logits_chunk_size": "entropy is computed in blocks always; remove it",
    "entropy_checkpointing": "entropy is computed in blocks always; remove it",
}
