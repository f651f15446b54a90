"""What OpenRLHF does where nothing is said, in our keys, and where such a default has none here.

Owns under which two names a flag of train_ppo_ray may stand, and its defaults. Must not know what a
value means that is said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ppo.config.migrate.given import Given
from ppo.config.migrate.translate import UNBOUNDED_KL_COEF, Answer
from ppo.config.trainers import openrlhf
from ppo.config.values import is_null

# the newer name of a flag that a rule or a default is about -> the older one
OLDER = {
    "train.batch_size": "train_batch_size",
    "train.micro_batch_size": "micro_train_batch_size",
    "train.dynamic_batch_enable": "use_dynamic_batch",
    "train.agent_func_path": "agent_func_path",
    "rollout.batch_size": "rollout_batch_size",
    "rollout.n_samples_per_prompt": "n_samples_per_prompt",
    "algo.advantage.estimator": "advantage_estimator",
    "algo.advantage.no_std_norm": "no_advantage_std_norm",
    "algo.dynamic_filtering_enable": "dynamic_filtering",
    "algo.dynamic_filtering_range": "dynamic_filtering_reward_range",
    "algo.kl.init_coef": "init_kl_coef",
    "algo.kl.target": "kl_target",
    "algo.kl.use_loss": "use_kl_loss",
    "algo.kl.estimator": "kl_estimator",
    "actor.eps_clip_low_high": "eps_clip_low_high",
    "actor.policy_loss_type": "policy_loss_type",
    "actor.num_nodes": "actor_num_nodes",
    "actor.num_gpus_per_node": "actor_num_gpus_per_node",
    "critic.model_name_or_path": "critic_pretrain",
    "reward.model_name_or_path": "reward_pretrain",
    "reward.remote_url": "remote_rm_url",
    "reward.clip_range": "reward_clip_range",
    "reward.normalize_enable": "normalize_reward",
    "reward.overlong_buffer_len": "overlong_buffer_len",
    "data.prompt_dataset": "prompt_data",
    "data.label_key": "label_key",
    "data.input_template": "input_template",
    "data.apply_chat_template": "apply_chat_template",
    "ckpt.save_steps": "save_steps",
    "eval.steps": "eval_steps",
    "eval.dataset": "eval_dataset",
    "ckpt.save_hf": "save_hf_ckpt",
    "critic.freezing_steps": "freezing_actor_steps",
    "ds.zero_stage": "zero_stage",
    "ds.param_dtype": "param_dtype",
    "ds.ring_attn_size": "ring_attn_size",
    "ds.tensor_parallel_size": "ds_tensor_parallel_size",
    "logger.wandb.key": "use_wandb",
}
_NEWER = {flag for flag in (*OLDER, *openrlhf.SAME, *openrlhf.ADVICE) if "." in flag}
MAX_LEN = 2048
"""data.max_len: of prompt and response together"""
_TEXT_AS_IT_IS = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_OF_ITS_OPTIMIZER = {
    "betas": "[0.9, 0.95]",
    "lr_scheduler_type": "cosine",
    "lr_warmup_steps_ratio": 0.03,
    "min_lr_ratio": 0.1,
    "weight_decay": 0.0,
}
_ALWAYS = {
    "actor.clip_ratio_c": 1e9,
    **{f"actor.optim.{name}": value for name, value in _OF_ITS_OPTIMIZER.items()},
    "actor.ppo_mini_batch_size": 128,
    "algorithm.kl_ctrl.kl_coef": 0.01,
    "critic.optim.lr": 9e-6,
    "data.prompt_key": "input",
    "data.filter_overlong_prompts": False,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 1024,
    "guards.preset": "none",
    "trainer.max_ckpt_to_keep": 3,
    "trainer.save_freq": 0,
    "trainer.test_freq": -1,
    "trainer.val_before_train": False,
}
_OF_THE_CRITIC = {  # of newer releases; in older ones the actor's are the critic's too
    **{f"critic.optim.{name}": value for name, value in _OF_ITS_OPTIMIZER.items()},
    "critic.optim.eps": 1e-8,
    "critic.grad_clip": 1.0,
}
_OF_EVALUATION = {"rollout.val_kwargs.n": 4, "rollout.val_kwargs.temperature": 0.6}


def defaults(given: Given) -> Mapping[str, Any]:
    """By our key, as YAML has them; those that depend on others only where these are said."""
    found: dict[str, Any] = dict(_ALWAYS)
    if is_newer(given):
        found |= _OF_THE_CRITIC
        response = number_of(given, "rollout.max_new_tokens", 0)
        if 0 < response < MAX_LEN:
            found["data.max_prompt_length"] = MAX_LEN - response
    else:
        found["data.truncation"] = "right"
    if not is_on(given, "apply_chat_template") and is_null(value_of(given, "input_template")):
        found["model.custom_chat_template"] = json.dumps(_TEXT_AS_IT_IS)
    if not is_null(value_of(given, "eval_dataset")):
        found |= _OF_EVALUATION
    if not is_null(value_of(given, "kl_target")) and not is_on(given, "use_kl_loss"):
        found |= UNBOUNDED_KL_COEF
    if str(value_of(given, "policy_loss_type")) == "gspo":
        found |= {
            "actor.loss_agg_mode": "seq-mean-token-mean",
            "critic.loss_agg_mode": "token-mean",
        }
    if _shuffles(given):
        found["actor.shuffle"] = True
    if has_reward_model(given):
        found["critic.model.path"] = str(value_of(given, "reward_pretrain")).partition(",")[0]
    return found


def differences(given: Given) -> Mapping[str, Answer]:
    """Defaults without a key that holds the same here."""
    found: dict[str, Answer] = {}
    if has_reward_model(given) and value_of(given, "reward_clip_range") is None:
        why = "not said: scores are clipped to -10 and 10 there, and not here"
        found["reward_clip_range"] = Answer(gap=why)
    if is_on(given, "dynamic_filtering") and not _has(given, "dynamic_filtering_reward_range"):
        why = "not said: groups with a mean score in 0 to 1 are kept there, without these ends; "
        found["dynamic_filtering_reward_range"] = Answer(gap=f"{why}here those that differ")
    if not is_newer(given) and not is_on(given, "bf16"):
        why = "not said: the checkpoint's dtype computes there, here "
        found["bf16"] = Answer(gap=f"{why}actor.fsdp.mixed_precision.param_dtype, bfloat16")
    if is_newer(given) and not {"data.max_len", "rollout.max_new_tokens"} & given.keys.keys():
        found["data.max_len"] = Answer(gap=f"not said, {MAX_LEN}: {OF_BOTH}")
    return found


OF_BOTH = (
    "a response may take what its prompt leaves of it there; say data.max_prompt_length and "
    "data.max_response_length"
)


def is_newer(given: Given) -> bool:
    """Whether a flag stands under its newer name, with dots."""
    return bool(_NEWER & given.keys.keys())


def has_reward_model(given: Given) -> bool:
    """Whether a reward model scores: neither a server nor an agent does."""
    others = ("remote_rm_url", "agent_func_path")
    return _has(given, "reward_pretrain") and not any(_has(given, flag) for flag in others)


def value_of(given: Given, flag: str, default: Any = None) -> Any:
    """The raw value of a flag, under either name; flag: the older one, if it has two."""
    newer = next((new for new, old in OLDER.items() if old == flag), flag)
    return given.keys.get(newer, given.keys.get(flag, default))


def is_on(given: Given, flag: str) -> bool:
    """Whether a flag without a value is there."""
    return str(value_of(given, flag, "false")).lower() == "true"


def number_of(given: Given, flag: str, default: int) -> int:
    """A whole number; what is none is the default."""
    text = str(value_of(given, flag, default))
    return int(text) if text.isdigit() else default


def _has(given: Given, flag: str) -> bool:
    return not is_null(value_of(given, flag))


def _shuffles(given: Given) -> bool:
    """Samples are drawn in any order, where there is more than one optimizer step of them."""
    is_ordered = is_on(given, "use_dynamic_batch") or any(
        number_of(given, flag, 1) > 1 for flag in ("ring_attn_size", "ds_tensor_parallel_size")
    )
    of_all = number_of(given, "rollout_batch_size", 1024)
    of_all *= number_of(given, "n_samples_per_prompt", 1)
    return not is_ordered and number_of(given, "train_batch_size", 128) < of_all
