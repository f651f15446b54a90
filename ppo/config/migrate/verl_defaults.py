"""What verl does where nothing is said, in our keys, and where such a default has none here.

Releases 0.3 to 0.9, as the newest of them has it in its ppo_trainer.yaml and dataclasses. Must not
know what a value means that is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppo.config.migrate.given import Given
from ppo.config.migrate.translate import UNBOUNDED_KL_COEF, Answer
from ppo.config.trainers.verl import EPISODES, REINFORCE
from ppo.config.values import is_null

PREFIX = "actor_rollout_ref."
TURNS = "rollout.multi_turn."
_ALWAYS = {
    "algorithm.use_kl_in_reward": False,
    "actor.clip_ratio_low": 0.2,
    "actor.clip_ratio_high": 0.2,
    "critic.grad_clip": 1.0,
    "critic.optim.lr_warmup_steps": 0,
    "critic.optim.lr_warmup_steps_ratio": 0.0,
    "critic.optim.lr_scheduler_type": "constant",
    "critic.optim.min_lr_ratio": 0.0,
    "critic.optim.weight_decay": 0.01,
    "critic.optim.betas": "[0.9, 0.999]",
    "critic.model.lora_rank": 0,
    "critic.fsdp.param_offload": False,
    "critic.fsdp.optimizer_offload": False,
    "critic.fsdp.mixed_precision.param_dtype": "bfloat16",
    "critic.fsdp.mixed_precision.reduce_dtype": "float32",
    "critic.checkpoint.save_contents": "[model, optimizer, extra]",
    "ref.fsdp.mixed_precision.param_dtype": "bfloat16",
    "data.filter_overlong_prompts": False,
    "rollout.gpu_memory_utilization": 0.5,
    "rollout.tensor_model_parallel_size": 2,
    "guards.preset": "none",
    "trainer.total_epochs": 30,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.max_ckpt_to_keep": "null",
}
_OF_THE_CRITICS_ADAPTERS = {
    "critic.model.lora_alpha": 16,
    "critic.model.lora_target_modules": "[all-linear]",
    "critic.model.lora_exclude_modules": "[]",
    "critic.model.lora_dropout": 0.0,
}
OF_SEQUENCES = ("gspo", "geo_mean", "sapo")
"""policy losses that are means of sequences there, whatever loss_agg_mode says"""
_OF_TURNS = {"rollout.episode.max_turns": 10000, "rollout.episode.tool_format": "hermes"}
"""turns end with the response's length alone there"""

_PARALLEL = "of the parallelism of an engine rollout.tensor_model_parallel_size alone is built"
LEFT_AS_THEY_ARE = {
    **dict.fromkeys(
        ("actor.router_replay.mode", "ref.router_replay.mode"),
        ("disabled", "replay of the router's choices is not built"),
    ),
    **{
        f"rollout.{kind}_parallel_size": ("1", _PARALLEL)
        for kind in ("data", "expert", "pipeline_model")
    },
    "rollout.scheduling_policy": ("fcfs", "use rollout.engine_kwargs.schedule_policy"),
    "rollout.agent.default_agent_loop": ("single_turn_agent", EPISODES),
    "reward.reward_manager.module.name": (
        "custom_reward_manager",
        "use reward.function for a rule of your own",
    ),
    "reward.reward_manager.source": ("register", "use reward.function for a rule of your own"),
    "algorithm.rollout_correction.loss_type": ("ppo_clip", REINFORCE),
    "data.image_key": ("images", "vision is not built"),
    "data.video_key": ("videos", "vision is not built"),
    "data.audio_key": ("audios", "vision is not built"),
    "data.image_patch_size": ("14", "vision is not built"),
    "actor.freeze_vision_tower": ("false", "vision is not built"),
    "rollout.do_sample": ("true", "training samples always"),
}
"""values that whole files of defaults have and that ask for nothing, and what others ask for"""


def defaults(given: Given) -> Mapping[str, Any]:
    """By our key, as YAML has them; those that depend on others only where these are said."""
    found: dict[str, Any] = dict(_ALWAYS)
    if is_above_0(value_of(given, "critic.model.lora_rank")):
        found |= _OF_THE_CRITICS_ADAPTERS
    if is_above_0(value_of(given, "model.lora.rank")):  # Megatron's section
        found["model.lora_alpha"] = 32
    if str(value_of(given, "algorithm.kl_ctrl.type")) == "adaptive":
        found |= UNBOUNDED_KL_COEF
    if has_turns(given):
        found |= _OF_TURNS
    if _loss_mode(given) in OF_SEQUENCES:
        found["actor.loss_agg_mode"] = "seq-mean-token-mean"
        found["critic.loss_agg_mode"] = value_of(given, "actor.loss_agg_mode", "token-mean")
    return found


def differences(given: Given) -> Mapping[str, Answer]:
    """Defaults without a key that holds the same here."""
    found: dict[str, Answer] = {}
    length = f"{TURNS}max_tool_response_length"
    if has_turns(given) and value_of(given, length) is None:
        why = "results of tools are cut to 256 characters there, and not at all here unless "
        found[length] = Answer(gap=f"{why}rollout.episode.max_observation_tokens says so")
    said, sequences = str(value_of(given, "actor.loss_agg_mode", "")), "seq-mean-token-mean"
    if _loss_mode(given) in OF_SEQUENCES and said not in ("", sequences):
        why = f"{_loss_mode(given)} is {sequences} there, whatever it says"
        found[f"actor.loss_agg_mode = {said}"] = Answer(gap=why)
    if _has_reward_model(given) and _has_reward_function(given):
        why = (
            "not the sum of both there: the model's score alone, or what the function makes of it "
        )
        why += "in a reward loop; here both count, by reward.weights (function: 0 leaves it out)"
        found["a reward model beside a reward function"] = Answer(gap=why)
    if value_of(given, "critic.model.path") is None and _has_critic(given):
        why = "not said: ~/models/deepseek-llm-7b-chat there, the model of model.path here"
        found["critic.model.path"] = Answer(unneeded=why)
    return found


def has_turns(given: Given) -> bool:
    """Whether turns are switched on, without which none of their keys means anything."""
    return str(value_of(given, f"{TURNS}enable", "false")).lower() == "true"


def value_of(given: Given, name: str, default: Any = None) -> Any:
    """The raw value of a key, with or without verl's prefix."""
    return given.keys.get(name, given.keys.get(PREFIX + name, default))


def _loss_mode(given: Given) -> str:
    return str(value_of(given, "actor.policy_loss.loss_mode", "vanilla"))


def _has_critic(given: Given) -> bool:
    return str(value_of(given, "algorithm.adv_estimator", "gae")) == "gae"


def _has_reward_model(given: Given) -> bool:
    names = ("reward_model.enable", "reward.reward_model.enable")
    return any(str(value_of(given, name, "false")).lower() == "true" for name in names)


def _has_reward_function(given: Given) -> bool:
    names = ("custom_reward_function.path", "reward.custom_reward_function.path")
    return any(not is_null(value_of(given, name)) for name in names)


def is_above_0(raw: Any) -> bool:
    """Of a rank: whether there are adapters."""
    return not is_null(raw) and str(raw) != "0"
