"""What verl's published example scripts set, in the ways that scripts say it."""

GSM8K = """
data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet
data.train_batch_size=1024 data.max_prompt_length=512
trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=-1
"""

# examples/ppo_trainer/run_deepseek7b_llm.sh
PPO = f"""
set -x
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae {" ".join(GSM8K.split())} \\
    data.max_response_length=512 data.filter_overlong_prompts=True data.truncation='error' \\
    actor_rollout_ref.model.path=deepseek-ai/deepseek-llm-7b-chat \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=False \\
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \\
    actor_rollout_ref.actor.use_kl_loss=False \\
    actor_rollout_ref.model.enable_gradient_checkpointing=True \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \\
    critic.optim.lr=1e-5 critic.model.use_remove_padding=False \\
    critic.model.path=deepseek-ai/deepseek-llm-7b-chat \\
    critic.model.enable_gradient_checkpointing=True \\
    critic.ppo_micro_batch_size_per_gpu=32 \\
    critic.model.fsdp_config.param_offload=False \\
    critic.model.fsdp_config.optimizer_offload=False \\
    algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=['console'] \\
    trainer.project_name='verl_example_gsm8k' \\
    trainer.experiment_name='deepseek_llm_7b_function_rm' \\
    trainer.total_training_steps=2 trainer.use_legacy_worker_impl=False \\
    trainer.total_epochs=15 $@

    # trainer.test_freq=1 \\
"""

# examples/grpo_trainer/run_qwen2-7b.sh, of 0.2: micro-batches counted over all devices
GRPO = f"""
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {" ".join(GSM8K.split())} \\
    data.val_batch_size=1312 data.max_response_length=512 \\
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size=128 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.fsdp_config.grad_offload=False \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size=128 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.ref.log_prob_micro_batch_size=128 \\
    actor_rollout_ref.ref.fsdp_config.param_offload=True \\
    algorithm.kl_ctrl.kl_coef=0.001 trainer.critic_warmup=0 \\
    trainer.logger=['console','wandb'] trainer.total_epochs=15 $@
"""

# examples/rloo_trainer/run_qwen2-7b.sh
RLOO = f"""
# export VLLM_ATTENTION_BACKEND=XFORMERS
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=rloo {" ".join(GSM8K.split())} \\
    data.max_response_length=1024 data.filter_overlong_prompts=True \\
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=80 \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=160 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=160 \\
    algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl algorithm.kl_ctrl.kl_coef=0.001 \\
    trainer.test_freq=5 trainer.total_epochs=15 $@
"""

# examples/ppo_trainer/run_qwen2-7b_rm_seq_balance.sh and run_qwen2-7b_rm.sh
REWARD_MODEL = """
gsm8k_train_path=$HOME/data/gsm8k/train.parquet
math_train_path=$HOME/data/math/train.parquet
train_files="['$gsm8k_train_path', '$math_train_path']"

python3 -m verl.trainer.main_ppo \\
    data.train_files="$train_files" data.val_files="$train_files" \\
    data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=512 \\
    data.return_raw_chat=True \\
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.model.use_rmpad=True \\
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size=128 \\
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    critic.optim.lr=1e-5 critic.model.use_rmpad=True \\
    critic.model.path=Qwen/Qwen2-7B-Instruct \\
    critic.model.enable_gradient_checkpointing=False \\
    critic.ppo_micro_batch_size=64 \\
    critic.model.fsdp_config.grad_offload=False \\
    reward_model.enable=True reward_model.model.path=sfairXC/FsfairX-LLaMA3-RM-v0.1\\
    reward_model.model.use_rmpad=True \\
    reward_model.model.fsdp_config.param_offload=True \\
    reward_model.micro_batch_size=16 \\
    algorithm.kl_ctrl.kl_coef=0.001 trainer.logger=['console','wandb'] \\
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.test_freq=5 trainer.total_epochs=15 $@
"""

# recipe/dapo/test_dapo_7b_math.sh, its lists as newer scripts have them
DAPO = """
#!/usr/bin/env bash
set -xeuo pipefail
exp_name='DAPO-Qwen2.5-7b-MATH'
adv_estimator=grpo
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
train_prompt_bsz=512
NNODES=${NNODES:-8}
RAY_DATA_HOME=${RAY_DATA_HOME:-"${HOME}/verl"}
MODEL_PATH=${MODEL_PATH:-"${RAY_DATA_HOME}/models/Qwen2.5-7B"}
CKPTS_DIR=${CKPTS_DIR:-"${RAY_DATA_HOME}/ckpts/${exp_name}"}
val_top_p=0.7
top_k=-1 # 0 for HF rollout, -1 for vLLM rollout
actor_ppo_max_token_len=$(((max_prompt_length + max_response_length) * 2))
infer_ppo_max_token_len=$(((max_prompt_length + max_response_length) * 3))
offload=True

ALGORITHM=(
    algorithm.adv_estimator=${adv_estimator}
    algorithm.use_kl_in_reward=False   # no reference
    algorithm.kl_ctrl.kl_coef=0.0
)
REWARD=(
    reward_model.reward_manager=dapo
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True
    ++reward_model.reward_kwargs.overlong_buffer_cfg.len=$((1024 * 4))
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0
    +reward_model.reward_kwargs.overlong_buffer_cfg.log=False
    +reward_model.reward_kwargs.max_resp_len=${max_response_length}
)
ray job submit --no-wait --runtime-env="${RUNTIME_ENV:-runtime_env.yaml}" -- \\
    python3 -m verl.trainer.main_ppo "${ALGORITHM[@]}" "${REWARD[@]}" \\
    data.train_files="${RAY_DATA_HOME}/data/dapo-math-17k.parquet" \\
    data.val_files="${RAY_DATA_HOME}/data/aime-2024.parquet" \\
    data.prompt_key=prompt data.truncation='left' \\
    data.max_prompt_length=${max_prompt_length} \\
    data.max_response_length=${max_response_length} \\
    data.train_batch_size=${train_prompt_bsz} \\
    actor_rollout_ref.rollout.n=16 \\
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.0 \\
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.clip_ratio_c=10.0 \\
    actor_rollout_ref.model.use_remove_padding=True \\
    +actor_rollout_ref.model.override_config.max_position_embeddings=32768 \\
    +actor_rollout_ref.model.override_config.embd_pdrop=0. \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True \\
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${actor_ppo_max_token_len} \\
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=${infer_ppo_max_token_len} \\
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=${infer_ppo_max_token_len} \\
    actor_rollout_ref.model.path="${MODEL_PATH}" \\
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \\
    actor_rollout_ref.actor.optim.weight_decay=0.1 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=${offload} \\
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=${offload} \\
    actor_rollout_ref.actor.loss_agg_mode="token-mean" \\
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.80 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
    actor_rollout_ref.rollout.enable_chunked_prefill=True \\
    actor_rollout_ref.rollout.top_k="${top_k}" \\
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \\
    actor_rollout_ref.rollout.val_kwargs.top_p=${val_top_p} \\
    actor_rollout_ref.rollout.val_kwargs.top_k=${top_k} \\
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \\
    actor_rollout_ref.ref.ulysses_sequence_parallel_size=4 \\
    actor_rollout_ref.actor.fsdp_config.fsdp_size=32 \\
    trainer.logger='["console","wandb"]' trainer.experiment_name="${exp_name}" \\
    trainer.n_gpus_per_node="${NGPUS_PER_NODE:-8}" trainer.nnodes="${NNODES}" \\
    trainer.test_freq=10 trainer.save_freq=10 trainer.total_epochs=10 \\
    trainer.default_local_dir="${CKPTS_DIR}" trainer.resume_mode=auto 2>&1 | tee "${exp_name}.log"
"""

EXAMPLES = {"ppo": PPO, "grpo": GRPO, "rloo": RLOO, "reward_model": REWARD_MODEL, "dapo": DAPO}
