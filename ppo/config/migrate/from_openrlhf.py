"""OpenRLHF: the flags of train_ppo_ray, with underscores (up to 0.9) or dots (since).

Owns what their values mean here, and their defaults. Names that hold the same value are in
ppo/config/trainers/openrlhf.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppo.config.foreign import Foreign, foreign
from ppo.config.migrate.given import Given
from ppo.config.migrate.translate import (
    BY_TOKENS,
    NOTHING,
    Answer,
    Dialect,
    Rule,
    loggers,
    raw_of,
)
from ppo.config.schema import schema
from ppo.config.trainers import openrlhf
from ppo.config.values import is_null

# the newer name of a flag that a rule is about -> the older one
_OLDER = {
    "train.batch_size": "train_batch_size",
    "train.micro_batch_size": "micro_train_batch_size",
    "rollout.batch_size": "rollout_batch_size",
    "rollout.n_samples_per_prompt": "n_samples_per_prompt",
    "algo.advantage.estimator": "advantage_estimator",
    "algo.advantage.no_std_norm": "no_advantage_std_norm",
    "algo.kl.init_coef": "init_kl_coef",
    "algo.kl.target": "kl_target",
    "algo.kl.use_loss": "use_kl_loss",
    "algo.kl.estimator": "kl_estimator",
    "actor.eps_clip_low_high": "eps_clip_low_high",
    "actor.policy_loss_type": "policy_loss_type",
    "actor.num_nodes": "actor_num_nodes",
    "actor.num_gpus_per_node": "actor_num_gpus_per_node",
    "reward.model_name_or_path": "reward_pretrain",
    "reward.remote_url": "remote_rm_url",
    "data.prompt_dataset": "prompt_data",
    "data.label_key": "label_key",
    "ckpt.save_steps": "save_steps",
    "eval.steps": "eval_steps",
    "ckpt.save_hf": "save_hf_ckpt",
    "critic.freezing_steps": "freezing_actor_steps",
    "ds.zero_stage": "zero_stage",
    "ds.param_dtype": "param_dtype",
    "logger.wandb.key": "use_wandb",
}

DEFAULTS = {
    "actor.clip_ratio_c": 1e9,
    "actor.optim.betas": "[0.9, 0.95]",
    "actor.optim.lr_scheduler_type": "cosine",
    "actor.optim.lr_warmup_steps_ratio": 0.03,
    "actor.optim.min_lr_ratio": 0.1,
    "actor.optim.weight_decay": 0.0,
    "actor.ppo_mini_batch_size": 128,
    "algorithm.kl_ctrl.kl_coef": 0.01,
    "critic.optim.lr": 9e-6,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 1024,
    "guards.preset": "none",
    "trainer.max_ckpt_to_keep": 3,
    "trainer.save_freq": 0,
    "trainer.test_freq": -1,
    "trainer.val_before_train": False,
}
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
        own_name=lambda flag: _OLDER.get(flag, flag),
        lookup=_lookup,
        rule=lambda flag: RULES.get(flag),
        whole=_whole,
        defaults=DEFAULTS,
    )


def _lookup(flag: str) -> Foreign | None:
    known = set(schema())
    if openrlhf.SAME.get(flag) in known:
        return Foreign("", openrlhf.SAME[flag])
    advice = openrlhf.ADVICE.get(flag)
    return Foreign(advice) if advice else foreign(flag, known)


def value_of(given: Given, flag: str, default: Any = None) -> Any:
    """The raw value of a flag, under either name."""
    newer = next((new for new, old in _OLDER.items() if old == flag), flag)
    return given.keys.get(newer, given.keys.get(flag, default))


def _is_on(given: Given, flag: str) -> bool:
    return str(value_of(given, flag, "false")).lower() == "true"


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
    is_off, in_loss = str(coefficient) in ("0", "0.0"), _is_on(given, "use_kl_loss")
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
    return found


def _estimator(raw: Any, given: Given) -> Answer:
    values = {"algorithm.adv_estimator": _ESTIMATORS.get(str(raw), raw)}
    if str(raw) == "dr_grpo":
        values["algorithm.norm_adv_by_std_in_grpo"] = raw_of(False)
    return Answer(values)


def _scheduler(raw: Any, given: Given) -> Answer:
    kind = {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"}.get(str(raw), raw)
    least = raw_of(0.1 if str(raw) == "cosine_with_min_lr" else 0.0)
    return Answer({"actor.optim.lr_scheduler_type": kind, "actor.optim.min_lr_ratio": least})


def _clip(raw: Any, given: Given) -> Answer:
    if not isinstance(raw, list) or len(raw) != 2:
        return NOTHING
    return Answer({"actor.clip_ratio_low": raw[0], "actor.clip_ratio_high": raw[1]})


def _loss(raw: Any, given: Given) -> Answer:
    return Answer({"actor.policy_loss.loss_mode": {"ppo": "vanilla"}.get(str(raw), raw)})


def _files(raw: Any, given: Given) -> Answer:
    names = [str(name) for name in (raw if isinstance(raw, list) else str(raw).split(","))]
    if all(name == "tiny" or name.endswith((".parquet", ".jsonl", ".json")) for name in names):
        return Answer({"data.train_files": names})
    return Answer(
        gap="data sets become files first, `python -m ppo.data.prepare --help` lists how; then say "
        "data.train_files"
    )


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
    "no_advantage_std_norm": _on({"algorithm.norm_adv_by_std_in_grpo": raw_of(False)}),
    "lr_scheduler": _scheduler,
    "eps_clip_low_high": _clip,
    "policy_loss_type": _loss,
    "actor_num_nodes": lambda raw, given: Answer({"check.nnodes": raw}),
    "actor_num_gpus_per_node": lambda raw, given: Answer({"check.nproc_per_node": raw}),
    "prompt_data": _files,
    "label_key": _label,
    "remote_rm_url": _reward_function,
    "reward_pretrain": lambda raw, given: Answer(
        {"reward.model.enable": raw_of(True), "reward.model.path": raw}
    ),
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
