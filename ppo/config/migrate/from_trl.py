"""TRL: GRPOConfig, RLOOConfig and PPOConfig: values that mean another thing here.

Releases 0.17 to 1.16. Names that hold the same value are in ppo/config/trainers/trl.py, defaults in
trl_defaults.py, how batches are counted in trl_batches.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppo.config.foreign import Foreign, foreign
from ppo.config.migrate.given import Given
from ppo.config.migrate.translate import (
    NOTHING,
    Answer,
    Dialect,
    Rule,
    loggers,
    prompt_files,
    raw_of,
)
from ppo.config.migrate.trl_batches import algorithm_of, steps_of, whole_number
from ppo.config.migrate.trl_defaults import (
    defaults,
    differences,
    has_adapters,
    has_kl_loss,
    is_cispo,
)
from ppo.config.schema import schema
from ppo.config.trainers import trl
from ppo.config.values import is_null

CONFIG_CLASSES = (
    *("GRPOConfig", "RLOOConfig", "PPOConfig", "ModelConfig", "LoraConfig", "ScriptArguments"),
    "GRPOScriptArguments",
)
"""whose calls are read; the first of those that a file has says which trainer it is"""


def dialect(given: Given) -> Dialect:
    """How the names of the class that is meant become ours."""
    return Dialect(
        name="TRL",
        own_name=lambda name: name,
        lookup=_lookup,
        rule=lambda name: RULES.get(name),
        whole=_whole,
        defaults=defaults(given),
    )


def _lookup(name: str) -> Foreign | None:
    known = set(schema())
    if trl.SAME.get(name) in known:
        return Foreign("", trl.SAME[name])
    return Foreign(trl.ADVICE[name]) if name in trl.ADVICE else foreign(name, known)


def _whole(given: Given) -> Mapping[str, Answer]:
    algorithm, steps = algorithm_of(given), steps_of(given)
    estimator = {"ppo": "gae"}.get(algorithm, algorithm)
    values: dict[str, Any] = {"algorithm.adv_estimator": estimator}
    found = {"algorithm": Answer(values)}
    sizes = {"data.train_batch_size": steps.prompts, "actor.ppo_mini_batch_size": steps.mini_batch}
    counted = f"batches are those of {steps.world_size} devices"
    gap = "" if steps.is_counted else f"{counted}: say how many with check.nproc_per_node=N"
    if not steps.prompts:
        gap = "the batch is no whole number of prompts: say data.train_batch_size and "
        gap += "actor.ppo_mini_batch_size, in prompts"
    sizes = {key: raw_of(size) for key, size in sizes.items() if size and key not in given.keys}
    found["batches"] = Answer(sizes, gap)
    if steps.is_counted and "nproc_per_node" in given.ranks:
        found["machine"] = Answer(
            {f"check.{name}": raw_of(number) for name, number in given.ranks.items()}
        )
    if {"adam_beta1", "adam_beta2"} & given.keys.keys():
        betas = [given.keys.get("adam_beta1", "0.9"), given.keys.get("adam_beta2", "0.999")]
        found["adam"] = Answer({"actor.optim.betas": betas})
    if algorithm == "ppo":
        lr = given.keys.get("learning_rate", raw_of(3e-6))
        found["learning_rate"] = Answer({"critic.optim.lr": lr})
    if "save_steps" not in given.keys and "save_strategy" not in given.keys:
        every = raw_of(max(1, 500 // steps.optimizer_steps))
        found["save_steps"] = Answer({"trainer.save_freq": every})
    if _corrects_by_default(given):
        subject = "vllm_importance_sampling_correction, on where nothing is said"
        found[subject] = _importance("true", given)
    return {**found, **differences(given)}


def _corrects_by_default(given: Given) -> bool:
    uses_vllm = str(given.keys.get("use_vllm", "false")).lower() == "true"
    is_said = "vllm_importance_sampling_correction" in given.keys
    return uses_vllm and not is_said and algorithm_of(given) == "grpo"


def _beta(raw: Any, given: Given) -> Answer:
    is_on = str(raw) not in ("0", "0.0")
    if algorithm_of(given) == "rloo":
        values = {"algorithm.use_kl_in_reward": raw_of(is_on)}
        return Answer(values | ({"algorithm.kl_ctrl.kl_coef": raw} if is_on else {}))
    return Answer(
        {"actor.use_kl_loss": raw_of(is_on)} | ({"actor.kl_loss_coef": raw} if is_on else {})
    )


def _loss_type(raw: Any, given: Given) -> Answer:
    mode = {
        "grpo": "seq-mean-token-mean",
        "dapo": "token-mean",
        "bnpo": "token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
    }.get(str(raw))
    if mode:
        return Answer({"actor.loss_agg_mode": mode})
    if str(raw) == "cispo":
        return Answer({"actor.policy_loss.loss_mode": raw})
    if str(raw) == "sapo":
        sequences = {"actor.loss_agg_mode": "seq-mean-token-mean"}
        return Answer({"actor.policy_loss.loss_mode": raw, **sequences})
    return Answer(gap="is no loss that is built: see actor.policy_loss.loss_mode")


def _scale(raw: Any, given: Given) -> Answer:
    text = str(raw).lower()
    if text in ("true", "group", "false", "none"):
        divides = text in ("true", "group")
        return Answer({"algorithm.norm_adv_by_std_in_grpo": raw_of(divides)})
    return Answer(gap="advantages are divided by the deviation of a group, or by nothing")


def _per_iteration(key: str) -> Rule:
    """Optimizer steps there, iterations here."""

    def rule(raw: Any, given: Given) -> Answer:
        steps, each = whole_number(raw), steps_of(given).optimizer_steps
        if steps is None:
            off = is_null(raw) or str(raw) in ("0", "0.0", "-1")
            return Answer(gap="" if off else "a share of the run: say it in iterations")
        return Answer({key: raw_of(max(1, round(steps / each)))})

    return rule


def _strategy(key: str) -> Rule:
    def rule(raw: Any, given: Given) -> Answer:
        if str(raw) == "no":
            return Answer({key: raw_of(-1)})
        gap = f"say {key} in iterations"
        return NOTHING if str(raw) == "steps" else Answer(gap=gap)

    return rule


def _episodes(raw: Any, given: Given) -> Answer:
    steps, total = steps_of(given), whole_number(raw)
    if not steps.prompts or total is None:
        return NOTHING
    return Answer({"trainer.total_training_steps": raw_of(-(-total // steps.prompts))})


def _level(raw: Any, given: Given) -> Answer:
    if str(raw).startswith("sequence"):
        return Answer({"actor.policy_loss.loss_mode": "gspo"})
    return NOTHING if str(raw) == "token" else Answer(gap="ratios are of tokens, or of sequences")


def _importance(raw: Any, given: Given) -> Answer:
    """Truncated weights against the mismatch of engine and trainer."""
    mode = str(given.keys.get("vllm_importance_sampling_mode", "sequence_mask"))
    if str(raw).lower() != "true":
        return NOTHING
    if mode in ("token_truncate", "sequence_truncate"):
        return Answer({"algorithm.rollout_correction.rollout_is": mode.partition("_")[0]})
    return Answer(
        gap=f"{mode}: use algorithm.rollout_correction.icepop for tokens, reject for sequences"
    )


def _only(*accepted: str, why: str) -> Rule:
    """A value that asks for what is done anyhow, or a gap."""
    return lambda raw, given: NOTHING if str(raw).lower() in accepted else Answer(gap=why)


def _counted(raw: Any, given: Given) -> Answer:
    return NOTHING


def _adapter(key: str) -> Rule:
    why = "use_peft is off: the whole model is trained"
    return lambda raw, given: Answer({key: raw}) if has_adapters(given) else Answer(unneeded=why)


def _epsilon_high(raw: Any, given: Given) -> Answer:
    """cispo's bound of the weights themselves; otherwise how far above 1 it is."""
    if not is_cispo(given) or is_null(raw):
        return Answer({"actor.clip_ratio_high": raw})
    try:
        above = float(str(raw)) - 1.0
    except ValueError:
        above = 0.0
    if above > 0:
        return Answer({"actor.clip_ratio_high": raw_of(above)})
    return Answer(gap="cispo's weights are cut there at this, and at no less than 1 here")


def _unbiased_kl(raw: Any, given: Given) -> Answer:
    kind = "low_var_kl+" if str(raw).lower() == "true" else "low_var_kl"
    return Answer({"actor.kl_loss_type": kind}) if has_kl_loss(given) else NOTHING


def _reward_model(raw: Any, given: Given) -> Answer:
    if is_null(raw):
        return NOTHING
    return Answer({"reward.model.enable": raw_of(True), "reward.model.path": raw})


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(
        (
            *("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches"),
            *("generation_batch_size", "steps_per_generation", "adam_beta1", "adam_beta2"),
            *("use_peft", "task_type"),
        ),
        _counted,
    ),
    "vllm_importance_sampling_mode": _counted,
    "use_vllm": lambda raw, given: Answer(unneeded="SGLang generates here"),
    "log_completions": lambda raw, given: Answer(unneeded="samples are in the run folder"),
    "beta": _beta,
    "loss_type": _loss_type,
    "scale_rewards": _scale,
    "importance_sampling_level": _level,
    "vllm_importance_sampling_correction": _importance,
    "max_steps": _per_iteration("trainer.total_training_steps"),
    "save_steps": _per_iteration("trainer.save_freq"),
    "eval_steps": _per_iteration("trainer.test_freq"),
    "warmup_steps": _per_iteration("actor.optim.lr_warmup_steps"),
    "save_strategy": _strategy("trainer.save_freq"),
    "eval_strategy": _strategy("trainer.test_freq"),
    "eval_on_start": lambda raw, given: Answer({"trainer.val_before_train": raw}),
    "total_episodes": _episodes,
    "dataset_name": lambda raw, given: prompt_files(raw),
    "report_to": lambda raw, given: loggers(raw, "console", "jsonl"),
    "lr_scheduler_type": lambda raw, given: Answer(
        {
            "actor.optim.lr_scheduler_type": (
                "constant" if str(raw) == "constant_with_warmup" else raw
            )
        }
    ),
    "reward_weights": lambda raw, given: Answer({"reward.function.weights": raw}),
    "reward_model_path": _reward_model,
    "reward_model_name_or_path": _reward_model,
    "r": _adapter("model.lora_rank"),
    **{
        name: _adapter(trl.SAME[name])
        for name in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
    },
    "target_modules": _adapter("model.lora_target_modules"),
    "exclude_modules": _adapter("model.lora_exclude_modules"),
    "epsilon_high": _epsilon_high,
    "use_bias_correction_kl": _unbiased_kl,
    "sft_model_path": lambda raw, given: Answer({"model.path": raw}),
    "top_k": lambda raw, given: Answer({"rollout.top_k": raw_of(-1) if str(raw) == "0" else raw}),
    "bf16": lambda raw, given: _only("true", why="say actor.fsdp.mixed_precision.param_dtype")(
        raw, given
    ),
    "fp16": lambda raw, given: (
        Answer({"actor.fsdp.mixed_precision.param_dtype": "float16"})
        if str(raw).lower() == "true"
        else NOTHING
    ),
    "optim": _only(
        *("adamw_torch", "adamw_torch_fused", "adamw_hf"), why="AdamW is the only optimizer"
    ),
    "bias": _only("none", "null", why="adapters have no biases"),
    "stop_token": _only(
        "eos", "null", "none", why="use rollout.stop for texts that end a response"
    ),
}
