"""OpenRLHF: the flags of train_ppo_ray, with underscores (up to 0.9) or dots (since).

Owns what their values mean here. Names that hold the same value are in
ppo/config/trainers/openrlhf.py, defaults in openrlhf_defaults.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppo.config.foreign import Foreign, foreign
from ppo.config.migrate.given import Given
from ppo.config.migrate.openrlhf_defaults import (
    OF_BOTH,
    OLDER,
    defaults,
    differences,
    is_on,
    number_of,
    value_of,
)
from ppo.config.migrate.translate import (
    BY_TOKENS,
    NOTHING,
    Answer,
    Dialect,
    Rule,
    loggers,
    prompt_files,
    raw_of,
)
from ppo.config.schema import schema
from ppo.config.trainers import openrlhf
from ppo.config.values import is_null

_CORRECTION = "algo.advantage.is_correction"
_ESTIMATORS = {
    "reinforce": "reinforce_plus_plus",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
    "group_norm": "grpo",
    "dr_grpo": "grpo",
}


def dialect(given: Given) -> Dialect:
    """How flags become our keys."""
    return Dialect(
        name="OpenRLHF",
        own_name=lambda flag: OLDER.get(flag, flag),
        lookup=_lookup,
        rule=lambda flag: RULES.get(flag),
        whole=_whole,
        defaults=defaults(given),
    )


def _lookup(flag: str) -> Foreign | None:
    known = set(schema())
    if openrlhf.SAME.get(flag) in known:
        return Foreign("", openrlhf.SAME[flag])
    advice = openrlhf.ADVICE.get(flag)
    return Foreign(advice) if advice else foreign(flag, known)


def _whole(given: Given) -> Mapping[str, Answer]:
    found: dict[str, Answer] = {}
    batch = str(value_of(given, "train_batch_size", "128"))
    n = str(value_of(given, "n_samples_per_prompt", "1"))
    if batch.isdigit() and n.isdigit() and int(n) > 0 and int(batch) % int(n) == 0:
        found["train_batch_size"] = Answer(
            {"actor.ppo_mini_batch_size": raw_of(int(batch) // int(n))}
        )
    else:
        gap = f"{batch} is no whole number of prompts of {n} samples: say actor.ppo_mini_batch_size"
        found["train_batch_size"] = Answer(gap=gap)
    coefficient = value_of(given, "init_kl_coef", raw_of(0.01))
    is_off, in_loss = str(coefficient) in ("0", "0.0"), is_on(given, "use_kl_loss")
    values: dict[str, Any] = {"algorithm.use_kl_in_reward": raw_of(not is_off and not in_loss)}
    if in_loss:
        values |= {"actor.use_kl_loss": raw_of(not is_off), "actor.kl_loss_coef": coefficient}
        values["actor.kl_loss_type"] = value_of(given, "kl_estimator", "k1")
    elif not is_off:
        values["algorithm.kl_ctrl.kl_coef"] = coefficient
        values["algorithm.kl_penalty"] = value_of(given, "kl_estimator", "k1")
    if not is_null(value_of(given, "kl_target")) and not in_loss:
        values["algorithm.kl_ctrl.type"] = "adaptive"
        values["algorithm.kl_ctrl.target_kl"] = value_of(given, "kl_target")
    found["kl"] = Answer(values)
    return {**found, **differences(given)}


def _estimator(raw: Any, given: Given) -> Answer:
    values = {"algorithm.adv_estimator": _ESTIMATORS.get(str(raw), raw)}
    if str(raw) == "dr_grpo":
        values["algorithm.norm_adv_by_std_in_grpo"] = raw_of(False)
    return Answer(values)


def _scheduler(section: str) -> Rule:
    """Of one optimizer; cosine_with_min_lr ends at min_lr_ratio, others at 0."""

    def rule(raw: Any, given: Given) -> Answer:
        kind = {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"}.get(
            str(raw), raw
        )
        least = raw_of(0.0)
        if _ends_above_0(raw):
            least = given.keys.get(f"{section}.min_lr_ratio", raw_of(0.1))
        keys = {"lr_scheduler_type": kind, "min_lr_ratio": least}
        return Answer({f"{section}.optim.{name}": value for name, value in keys.items()})

    return rule


def _least(section: str) -> Rule:
    def rule(raw: Any, given: Given) -> Answer:
        if not _ends_above_0(given.keys.get(f"{section}.lr_scheduler", "cosine_with_min_lr")):
            return NOTHING
        return Answer({f"{section}.optim.min_lr_ratio": raw})

    return rule


def _ends_above_0(scheduler: Any) -> bool:
    return str(scheduler) == "cosine_with_min_lr"


def _clip(raw: Any, given: Given) -> Answer:
    if not isinstance(raw, list) or len(raw) != 2:
        return NOTHING
    return Answer({"actor.clip_ratio_low": raw[0], "actor.clip_ratio_high": raw[1]})


def _loss(raw: Any, given: Given) -> Answer:
    return Answer({"actor.policy_loss.loss_mode": {"ppo": "vanilla"}.get(str(raw), raw)})


def _label(raw: Any, given: Given) -> Answer:
    if str(raw) == "ground_truth" or is_null(raw):
        return NOTHING
    why = "the ground truth is the column ground_truth: `python -m ppo.data.prepare jsonl` with"
    return Answer(gap=f"{why} --map {raw}=ground_truth renames it")


def _reward_function(raw: Any, given: Given) -> Answer:
    return Answer(
        gap="reward_func(queries, prompts, labels) is compute_score(data_source, solution_str, "
        "ground_truth, extra_info) here: wrap it in a file, or have that file call the server, and "
        "name it in reward.function.path (ppo/rewards/README.md)"
    )


def _reward_model(raw: Any, given: Given) -> Answer:
    if "," in str(raw):
        return Answer(gap="one reward model scores here: name one in reward.model.path")
    return Answer({"reward.model.enable": raw_of(True), "reward.model.path": raw})


def _normalize(raw: Any, given: Given) -> Answer:
    """Whose statistics those are is another matter."""
    if str(raw).lower() != "true":
        return NOTHING
    why = "with the mean and deviation that the reward model was saved with there; with those of "
    return Answer({"reward.normalize": raw}, gap=f"{why}the scores of the run so far here")


def _without_deviation(raw: Any, given: Given) -> Answer:
    """Of the advantages of a batch, which group_norm and rloo do not scale."""
    scaled = ("gae", "reinforce", "reinforce_baseline")
    if (
        str(raw).lower() != "true"
        or str(value_of(given, "advantage_estimator", "gae")) not in scaled
    ):
        return NOTHING
    return Answer(gap="advantages of a batch are divided by their deviation here")


def _overlong(raw: Any, given: Given) -> Answer:
    """With the manager that applies it."""
    return (
        NOTHING
        if is_null(raw)
        else Answer({"reward.overlong_buffer.len": raw, "reward.manager": "dapo"})
    )


def _max_len(raw: Any, given: Given) -> Answer:
    """Of both together: the prompt has what the longest response leaves of it."""
    response, total = (
        number_of(given, "rollout.max_new_tokens", 0),
        number_of(given, "data.max_len", 0),
    )
    if 0 < response < total:
        return Answer({"data.max_prompt_length": raw_of(total - response)})
    return Answer(gap=OF_BOTH)


def _correction(raw: Any, given: Given) -> Answer:
    """Weights against the mismatch of engine and trainer, of newer releases."""
    if str(raw).lower() != "true":
        return NOTHING
    kind = str(given.keys.get(f"{_CORRECTION}_type", "tis"))
    bounds = given.keys.get(f"{_CORRECTION}_threshold", [raw_of(0.5), raw_of(5.0)])
    if kind == "seq-mask-tis" or not isinstance(bounds, list) or len(bounds) != 2:
        return Answer(gap="use algorithm.rollout_correction.reject: {seq_mean_k1: [low, high]}")
    ours = "algorithm.rollout_correction."
    values = {f"{ours}rollout_is": "token", f"{ours}rollout_is_threshold": bounds[1]}
    if kind == "icepop":
        return Answer(values | {f"{ours}icepop": bounds})
    return Answer(values, gap=f"weights below {bounds[0]} are raised to it there, and stay here")


def _threshold(raw: Any, given: Given) -> Answer:
    if isinstance(raw, list):
        return NOTHING  # of _correction
    return Answer({"algorithm.rollout_correction.rollout_is_threshold": raw})


def _optimizer(raw: Any, given: Given) -> Answer:
    return NOTHING if str(raw) == "adam" else Answer(gap="AdamW is the only optimizer")


def _dtype(raw: Any, given: Given) -> Answer:
    return Answer({"actor.fsdp.mixed_precision.param_dtype": raw})


def _every(key: str, otherwise: int) -> Rule:
    """Iterations; -1 is never there, but for what is done at the end."""
    return lambda raw, given: Answer({key: raw_of(otherwise) if str(raw) == "-1" else raw})


def _logger(name: str) -> Rule:
    def rule(raw: Any, given: Given) -> Answer:
        if is_null(raw) or str(raw).lower() == "false":
            return NOTHING
        return loggers(name, "console", "jsonl", "tensorboard")

    return rule


def _on(values: Mapping[str, Any]) -> Rule:
    """A flag that has no value."""
    return lambda raw, given: Answer(values) if str(raw).lower() == "true" else NOTHING


def _nothing(raw: Any, given: Given) -> Answer:
    return NOTHING


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(
        ("train_batch_size", "use_kl_loss", "init_kl_coef", "kl_estimator", "kl_target", "bf16"),
        _nothing,  # of _whole, or done anyhow
    ),
    "micro_train_batch_size": lambda raw, given: Answer(unneeded=BY_TOKENS),
    "zero_stage": lambda raw, given: Answer(
        unneeded="parameters are freed between passes; actor.fsdp.reshard_after_forward=false "
        "keeps them, as stage 2 does"
    ),
    "advantage_estimator": _estimator,
    "no_advantage_std_norm": _without_deviation,
    "lr_scheduler": _scheduler("actor"),
    **{f"{section}.lr_scheduler": _scheduler(section) for section in ("actor", "critic")},
    **{f"{section}.min_lr_ratio": _least(section) for section in ("actor", "critic")},
    **{f"{section}.optim": _optimizer for section in ("actor", "critic")},
    "enable_vllm_is_correction": _on({"algorithm.rollout_correction.rollout_is": "token"}),
    f"{_CORRECTION}_enable": _correction,
    f"{_CORRECTION}_type": _nothing,
    f"{_CORRECTION}_threshold": _threshold,
    "data.max_len": _max_len,
    "normalize_reward": _normalize,
    "overlong_buffer_len": _overlong,
    "eps_clip_low_high": _clip,
    "policy_loss_type": _loss,
    "actor_num_nodes": lambda raw, given: Answer({"check.nnodes": raw}),
    "actor_num_gpus_per_node": lambda raw, given: Answer({"check.nproc_per_node": raw}),
    "prompt_data": lambda raw, given: prompt_files(raw),
    "label_key": _label,
    "remote_rm_url": _reward_function,
    "reward_pretrain": _reward_model,
    "param_dtype": _dtype,
    "freezing_actor_steps": lambda raw, given: (
        NOTHING if str(raw) == "-1" else Answer({"trainer.critic_warmup": raw})
    ),
    "save_steps": _every("trainer.save_freq", 0),
    "eval_steps": _every("trainer.test_freq", -1),
    "save_hf_ckpt": _on(
        {"actor.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"]}
    ),
    "load_checkpoint": _nothing,  # a start resumes by itself
    "ckpt.load_enable": _nothing,
    "use_wandb": _logger("wandb"),
    "use_tensorboard": _logger("tensorboard"),
    "logger.tensorboard_dir": _logger("tensorboard"),
}
