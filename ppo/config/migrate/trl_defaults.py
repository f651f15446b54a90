"""What TRL does where nothing is said, in our keys, and where such a default has none here.

Of GRPOConfig, RLOOConfig and PPOConfig, ModelConfig and PEFT's LoraConfig, as release 1.12 has them
(older ones: README.md). Must not know what a value means that is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppo.config.migrate.given import Given
from ppo.config.migrate.translate import Answer
from ppo.config.migrate.trl_batches import algorithm_of, samples_of, steps_of, whole_number
from ppo.config.values import is_null

NO_LOWER_CLIP = 0.999999
"""actor.clip_ratio_low of cispo, whose weights have no lower bound there"""
_COMMON = {
    "actor.optim.lr_scheduler_type": "linear",
    "actor.optim.weight_decay": 0.0,
    "actor.clip_ratio_c": 1e9,
    "data.filter_overlong_prompts": False,
    "guards.preset": "none",
    "trainer.total_epochs": 3,
    "trainer.test_freq": -1,
    "trainer.val_before_train": False,
    "trainer.max_ckpt_to_keep": "null",
}
_OF: Mapping[str, Mapping[str, Any]] = {
    "grpo": _COMMON | {"algorithm.use_kl_in_reward": False, "rollout.n": 8},
    "rloo": _COMMON
    | {
        "actor.loss_agg_mode": "seq-mean-token-sum",
        "algorithm.kl_ctrl.kl_coef": 0.05,
        "data.max_response_length": 256,
        "rollout.n": 2,
    },
    "ppo": _COMMON
    | {
        "actor.optim.lr": 3e-6,
        "actor.ppo_epochs": 4,
        "algorithm.kl_ctrl.kl_coef": 0.05,
        "algorithm.lam": 0.95,
        "critic.cliprange_value": 0.2,
        "critic.model.lora_rank": 0,
        "data.max_response_length": 53,
        "rollout.temperature": 0.7,
    },
}
_TARGETS = {"model.lora_target_modules": "[q_proj, v_proj]"}
"""PEFT's, of Llama, Qwen, Mistral, Gemma and most others"""
_OF_MODEL_CONFIG = _TARGETS | {
    "model.lora_rank": 16,
    "model.lora_alpha": 32,
    "model.lora_dropout": 0.05,
}
_OF_LORA_CONFIG = _TARGETS | {"model.lora_rank": 8, "model.lora_alpha": 8}


def defaults(given: Given) -> Mapping[str, Any]:
    """By our key, as YAML has them; those that depend on others only where these are said."""
    algorithm, steps = algorithm_of(given), steps_of(given)
    found = dict(_OF[algorithm])
    if has_adapters(given):
        found |= _OF_MODEL_CONFIG if _is_on(given, "use_peft") else _OF_LORA_CONFIG
    if not is_null(given.keys.get("max_prompt_length")):
        found["data.truncation"] = "left"
    if steps.mini_batch < steps.prompts:
        found["actor.shuffle"] = True
    if algorithm == "ppo":
        return found | _of_ppo(given)
    return found | _of_evaluation(given, algorithm) | _of_grpo(given)


def differences(given: Given) -> Mapping[str, Answer]:
    """Defaults without a key that holds the same here."""
    algorithm, found = algorithm_of(given), dict[str, Answer]()
    if algorithm == "rloo" and steps_of(given).optimizer_steps > 1:
        why = "ratios and their clip are of whole sequences there, of tokens here; the first "
        found["RLOO"] = Answer(gap=f"{why}optimizer step of an iteration is the same")
    if is_cispo(given) and is_null(given.keys.get("epsilon_high")):
        why = "cispo cuts weights at epsilon there, 0.2 where it is not said: say "
        found["epsilon_high"] = Answer(gap=f"{why}actor.clip_ratio_high, at 1 + which they are cut")
    return found


def has_adapters(given: Given) -> bool:
    """Whether adapters are trained: the keys of ModelConfig mean nothing without use_peft."""
    return _is_on(given, "use_peft") or "LoraConfig" in given.calls


def is_cispo(given: Given) -> bool:
    """Whether the loss cuts weights at epsilon_high, where others clip at 1 + epsilon_high."""
    return str(given.keys.get("loss_type")) == "cispo"


def has_kl_loss(given: Given) -> bool:
    """Whether beta is above 0, of GRPO."""
    return algorithm_of(given) == "grpo" and str(given.keys.get("beta", "0")) not in ("0", "0.0")


def _of_grpo(given: Given) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if has_kl_loss(given):
        found["actor.kl_loss_type"] = "low_var_kl+"
    if is_cispo(given):
        found["actor.clip_ratio_low"] = NO_LOWER_CLIP
    if str(given.keys.get("vllm_importance_sampling_mode", "")).endswith("truncate"):
        found["algorithm.rollout_correction.rollout_is_threshold"] = 3.0
    return found


def _of_ppo(given: Given) -> dict[str, Any]:
    found: dict[str, Any] = {"actor.shuffle": True}
    if all(is_null(given.keys.get(name)) for name in ("stop_token", "stop_token_id")):
        found["rollout.ignore_eos"] = True
    reward_model = given.keys.get("reward_model_path")
    if not is_null(reward_model):
        found["critic.model.path"] = reward_model
    return found


def _of_evaluation(given: Given, algorithm: str) -> dict[str, Any]:
    """Evaluation samples as training does; every logging_steps unless eval_steps says more."""
    strategy = str(given.keys.get("eval_strategy", "no"))
    if strategy == "no" and not _is_on(given, "eval_on_start"):
        return {}
    found: dict[str, Any] = {
        "rollout.val_kwargs.n": samples_of(given, algorithm),
        "rollout.val_kwargs.temperature": given.keys.get("temperature", 1.0),
        "rollout.val_kwargs.top_p": given.keys.get("top_p", 1.0),
    }
    if strategy == "steps":
        every = whole_number(given.keys.get("logging_steps")) or 10
        found["trainer.test_freq"] = max(1, round(every / steps_of(given).optimizer_steps))
    return found


def _is_on(given: Given, name: str) -> bool:
    return str(given.keys.get(name, "false")).lower() == "true"
