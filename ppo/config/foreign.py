"""Keys that other trainers have, and keys of ours whose feature does not exist yet.

Owns the words that a person arriving with a verl, TRL or torchtitan file reads. Pure data and its
look-up: it must not know how files are read.
"""

from __future__ import annotations

from typing import NamedTuple

NO_RAY = "there is no Ray here: torchrun starts the ranks; remove it"
COLOCATED = "actor, rollout and ref always share the devices; remove it"

FOREIGN = {
    # verl
    "trainer.nnodes": "torchrun --nnodes says it (for --check: check.nnodes); remove it",
    "trainer.n_gpus_per_node": "torchrun --nproc_per_node says it (for --check: "
    "check.nproc_per_node); remove it",
    "ray_kwargs": NO_RAY,
    "ray_init": NO_RAY,
    "global_pool": NO_RAY,
    "resource_pool": NO_RAY,
    "resource_pool_spec": NO_RAY,
    "trainer.ray_wait_register_center_timeout": NO_RAY,
    "hybrid_engine": COLOCATED,
    "rollout.name": "use rollout.engine (auto, sglang, torch)",
    "rollout.mode": "generation is a call in the training program; remove it",
    "rollout.load_format": "weights always come from the trainer; remove it",
    "rollout.prompt_length": "use data.max_prompt_length",
    "rollout.response_length": "use data.max_response_length",
    "rollout.do_sample": "use rollout.temperature (0 = greedy)",
    "rollout.val_kwargs.do_sample": "use rollout.val_kwargs.temperature (0 = greedy)",
    "rollout.calculate_log_probs": "the engine's log-probs are always kept; remove it",
    "rollout.layered_summon_param": "rollout.reshard_bucket_mib bounds the memory; remove it",
    "rollout.log_prob_use_dynamic_bsz": "use actor.use_dynamic_bsz",
    "actor.use_dual_clip": "the dual clip is always on, with bound actor.clip_ratio_c (a large "
    "value switches it off)",
    "actor.strategy": "FSDP2 is the only strategy; remove it",
    "critic.strategy": "FSDP2 is the only strategy; remove it",
    "actor.use_torch_compile": "remove it",
    "critic.cliprange": "use critic.cliprange_value",
    "trainer.critic_warmup_steps": "use trainer.critic_warmup",
    "trainer.default_hdfs_dir": "use trainer.default_local_dir",
    "trainer.resume_from_path": "use trainer.resume_mode=PATH",
    "trainer.max_actor_ckpt_to_keep": "use trainer.max_ckpt_to_keep",
    "trainer.max_critic_ckpt_to_keep": "use trainer.max_ckpt_to_keep",
    "trainer.val_generations_to_log_to_wandb": "use trainer.log_val_generations",
    "data.tokenizer": "use model.tokenizer_path",
    "reward_model": "use reward.model",
    "reward_model.strategy": "FSDP2 is the only strategy; remove it",
    "reward_model.micro_batch_size_per_gpu": "use reward.model.max_token_len_per_gpu",
    "reward_model.use_dynamic_bsz": "use actor.use_dynamic_bsz",
    "reward_model.ulysses_sequence_parallel_size": "use actor.ulysses_sequence_parallel_size",
    "reward_model.max_length": "conversations are never cut; remove it",
    "reward_model.model.input_tokenizer": "its own tokenizer reads the conversation; remove it",
    "reward_model.model.use_remove_padding": "use model.use_remove_padding",
    "reward_model.model.trust_remote_code": "use model.trust_remote_code",
    "reward_model.launch_reward_fn_async": "remove it",
    "custom_reward_function": "use reward.function",
    "actor_rollout_ref": "sections have no prefix here: actor, ref, rollout, model",
    # names from other trainers, wherever they stand
    "vf_clip_param": "use critic.cliprange_value",
    "policy_kl_penalty": "use algorithm.kl_penalty and algorithm.kl_ctrl.kl_coef",
    "kl_target": "use algorithm.kl_ctrl.target_kl",
    "early_stop_kl": "stopping an epoch by KL belongs to guards, which are not built yet",
    "inference_engine": "use rollout.engine",
    "limit_all_gathers": "FSDP2 limits them by itself; remove it",
    "use_orig_params": "FSDP2 always keeps them; remove it",
    "data_parallel_size": "it follows from the world size and "
    "actor.ulysses_sequence_parallel_size; remove it",
    "learning_rate": "use actor.optim.lr and critic.optim.lr",
    "per_device_train_batch_size": "use actor.ppo_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "it follows from actor.ppo_mini_batch_size; remove it",
    "num_ppo_epochs": "use actor.ppo_epochs",
    "num_generations": "use rollout.n",
    "max_completion_length": "use data.max_response_length",
    "cliprange": "use actor.clip_ratio",
    "vf_coef": "the critic has its own optimizer: use critic.optim.lr",
    "max_grad_norm": "use actor.grad_clip",
    "num_train_epochs": "use trainer.total_epochs",
    "max_steps": "use trainer.total_training_steps",
}

# a path that begins like this ... is written like that
RENAMED = {
    "actor_rollout_ref.": "",
    "actor.fsdp_config.": "actor.fsdp.",
    "ref.fsdp_config.": "ref.fsdp.",
    "critic.model.fsdp_config.": "critic.fsdp.",
    "critic.forward_max_token_len_per_gpu": "critic.ppo_max_token_len_per_gpu",
    "critic.model.tokenizer_path": "model.tokenizer_path",
    "critic.model.enable_gradient_checkpointing": "model.enable_gradient_checkpointing",
    "critic.model.use_remove_padding": "model.use_remove_padding",
    "actor.ppo_micro_batch_size": "actor.ppo_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "rollout.log_prob_micro_batch_size": "actor.log_prob_max_token_len_per_gpu",
    "rollout.log_prob_max_token_len_per_gpu": "actor.log_prob_max_token_len_per_gpu",
    "ref.log_prob_micro_batch_size": "ref.log_prob_max_token_len_per_gpu",
    "reward_model.enable": "reward.model.enable",
    "reward_model.model.path": "reward.model.path",
    "reward_model.model.fsdp_config.": "reward.model.fsdp.",
    "reward_model.forward_max_token_len_per_gpu": "reward.model.max_token_len_per_gpu",
    "reward_model.reward_manager": "reward.manager",
    "rollout.tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "custom_reward_function.": "reward.function.",
    "reward.custom_reward_function.": "reward.function.",
}


class NotBuilt(NamedTuple):
    """A key of the specification without its feature."""

    off: str | None
    """the value that asks for nothing and is accepted; None = no value is"""
    instead: str = "leave it out"


NOT_BUILT = {
    "data.gen_batch_size": NotBuilt("null"),
    "model.lora_rank": NotBuilt("0"),
    "actor.policy_loss.loss_mode": NotBuilt("vanilla"),
    "actor.policy_loss": NotBuilt(None),
    "actor.tensor_parallel_size": NotBuilt("1", "use actor.ulysses_sequence_parallel_size"),
    "actor.optim.state_dtype": NotBuilt("float32"),
    "critic.optim.state_dtype": NotBuilt("float32"),
    "critic.tensor_parallel_size": NotBuilt("1", "use actor.ulysses_sequence_parallel_size"),
    "critic.normalize_returns": NotBuilt("false"),
    "reward.manager": NotBuilt("naive"),
    "reward.overlong_buffer": NotBuilt(None),
    "reward.normalize": NotBuilt("false"),
    "algorithm.filter_groups.enable": NotBuilt("false"),
    "algorithm.filter_groups": NotBuilt(None),
    "guards.preset": NotBuilt("none"),
    "guards": NotBuilt(None),
    "trainer.hang_timeout_s": NotBuilt(None, "use trainer.comm_timeout_s"),
    "trainer.profile_steps": NotBuilt("[]"),
    "trainer.alarms": NotBuilt(None),
}

NOT_BUILT_VALUES = {
    "actor.kl_loss_type": {"full"},
    "trainer.logger": {"wandb", "mlflow", "swanlab"},
}


def foreign_advice(path: str, known: set[str]) -> str | None:
    """What replaces a key of another trainer, or None if the path is not known to be one."""
    if path in FOREIGN:
        return FOREIGN[path]
    renamed = _rename(path)
    if renamed != path:
        if renamed in known:
            return f"write {renamed}"
        return FOREIGN.get(renamed) or foreign_advice(renamed, known) or _prefix_advice(path)
    return FOREIGN.get(path.rsplit(".", 1)[-1]) or _prefix_advice(path)


def not_built(path: str) -> NotBuilt | None:
    """The entry of a key, or of the section it stands in, whose feature does not exist yet.

    Keys of other trainers count as what they are called here.
    """
    parts = _rename(path).split(".")
    for length in range(len(parts), 0, -1):
        entry = NOT_BUILT.get(".".join(parts[:length]))
        if entry is not None:
            return entry
    return None


def is_read_inside(path: str) -> bool:
    """Whether a section that is not ours is to be answered key by key instead of as a whole."""
    inside = path + "."
    return inside.startswith(tuple(old for old in RENAMED if old.endswith("."))) or any(
        known.startswith(inside) for known in (*RENAMED, *NOT_BUILT)
    )


def _rename(path: str) -> str:
    for old, new in RENAMED.items():
        if path.startswith(old):
            rest = path[len(old) :]
            path = new + (rest if old.endswith(".") else "")
    return path


def _prefix_advice(path: str) -> str | None:
    parts = path.split(".")
    heads = (".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1))
    return next((FOREIGN[head] for head in heads if head in FOREIGN), None)
