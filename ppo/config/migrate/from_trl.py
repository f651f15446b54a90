"""TRL: GRPOConfig, RLOOConfig and PPOConfig, whose batches are counted for one device.

Owns what their values mean here, and their defaults (releases 0.17 to 1.16). Names that hold the
same value are in ppo/config/trainers/trl.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ppo.config.foreign import Foreign, foreign
from ppo.config.migrate.given import Given
from ppo.config.migrate.translate import NOTHING, Answer, Dialect, Rule, loggers, raw_of
from ppo.config.schema import schema
from ppo.config.trainers import trl
from ppo.config.values import is_null

CONFIG_CLASSES = ("GRPOConfig", "RLOOConfig", "PPOConfig", "ModelConfig", "ScriptArguments")
_OF_PPO = {"num_ppo_epochs", "num_mini_batches", "cliprange", "vf_coef", "response_length", "lam"}
_PROMPT_FILES = (".parquet", ".jsonl", ".json")

_COMMON = {
    "actor.optim.lr_scheduler_type": "linear",
    "actor.optim.weight_decay": 0.0,
    "actor.clip_ratio_c": 1e9,
    "guards.preset": "none",
    "trainer.total_epochs": 3,
    "trainer.test_freq": -1,
    "trainer.max_ckpt_to_keep": "null",
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "grpo": _COMMON
    | {
        "algorithm.use_kl_in_reward": False,
        "data.max_response_length": 256,
        "rollout.n": 8,
    },
    "rloo": _COMMON
    | {
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
        "data.max_response_length": 53,
        "rollout.temperature": 0.7,
    },
}


def dialect(given: Given) -> Dialect:
    """How the names of the class that is meant become ours."""
    algorithm = algorithm_of(given)
    return Dialect(
        name="TRL",
        own_name=lambda name: name,
        lookup=_lookup,
        rule=lambda name: RULES.get(name),
        whole=_whole,
        defaults=DEFAULTS[algorithm],
    )


def algorithm_of(given: Given) -> str:
    """grpo, rloo or ppo: as said, else by the name of class or program, else by the keys."""
    said = str(given.keys.get("algorithm.adv_estimator", ""))
    if said in ("grpo", "rloo", "gae"):
        return {"gae": "ppo"}.get(said, said)
    named = re.search("rloo|grpo|ppo", given.program.lower())
    if named:
        return named[0]
    if "rloo_k" in given.keys:
        return "rloo"
    return "ppo" if _OF_PPO & given.keys.keys() else "grpo"


def _lookup(name: str) -> Foreign | None:
    known = set(schema())
    if trl.SAME.get(name) in known:
        return Foreign("", trl.SAME[name])
    return Foreign(trl.ADVICE[name]) if name in trl.ADVICE else foreign(name, known)


class Steps(NamedTuple):
    """Batches over all devices, in prompts, and optimizer steps of an iteration."""

    prompts: int
    mini_batch: int
    optimizer_steps: int
    world_size: int
    is_counted: bool
    """whether it was said how many devices there are"""


def steps_of(given: Given) -> Steps:
    """The batches of the run there. One that is no whole number of prompts is 0."""
    nodes, ranks = (given.keys.get(f"check.{name}") for name in ("nnodes", "nproc_per_node"))
    said = [
        given.ranks.get("nnodes") or _int(nodes),
        given.ranks.get("nproc_per_node") or _int(ranks),
    ]
    world = given.ranks.get("world_size") or (said[0] or 1) * (said[1] or 8)
    is_counted = "world_size" in given.ranks or said[1] is not None
    accumulated = _int(given.keys.get("gradient_accumulation_steps")) or 1
    each = (_int(given.keys.get("per_device_train_batch_size")) or 8) * accumulated * world
    algorithm = algorithm_of(given)
    epochs = _int(given.keys.get("num_iterations")) or 1
    if algorithm == "ppo":
        parts = _int(given.keys.get("num_mini_batches")) or 1
        return Steps(parts * each, each, 1, world, is_counted)
    of_all = _int(given.keys.get("generation_batch_size")) or (
        each // accumulated * (_int(given.keys.get("steps_per_generation")) or accumulated)
    )
    default = {"grpo": 8, "rloo": 2}[algorithm]
    n = _int(given.keys.get("num_generations", given.keys.get("rloo_k"))) or default
    is_whole = of_all % n == each % n == of_all % each == 0
    prompts, mini_batch = (of_all // n, each // n) if is_whole else (0, 0)
    return Steps(prompts, mini_batch, max(1, of_all // each) * epochs, world, is_counted)


def _int(raw: Any) -> int | None:
    text = str(raw)
    return int(text) if text.isdigit() and int(text) > 0 else None


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
    return found


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
    if str(raw) in ("cispo", "sapo"):
        return Answer({"actor.policy_loss.loss_mode": raw})
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
        steps, each = _int(raw), steps_of(given).optimizer_steps
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
    steps, total = steps_of(given), _int(raw)
    if not steps.prompts or total is None:
        return NOTHING
    return Answer({"trainer.total_training_steps": raw_of(-(-total // steps.prompts))})


def _dataset(raw: Any, given: Given) -> Answer:
    if str(raw).endswith(_PROMPT_FILES) or str(raw) == "tiny":
        return Answer({"data.train_files": raw})
    return Answer(
        gap="data sets become files first, `python -m ppo.data.prepare --help` lists how; then say "
        "data.train_files"
    )


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


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(
        (
            *("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches"),
            *("generation_batch_size", "steps_per_generation", "adam_beta1", "adam_beta2"),
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
    "dataset_name": _dataset,
    "report_to": lambda raw, given: loggers(raw, "console", "jsonl"),
    "lr_scheduler_type": lambda raw, given: Answer(
        {
            "actor.optim.lr_scheduler_type": (
                "constant" if str(raw) == "constant_with_warmup" else raw
            )
        }
    ),
    "reward_weights": lambda raw, given: Answer({"reward.function.weights": raw}),
    "reward_model_path": lambda raw, given: Answer(
        {"reward.model.enable": raw_of(True), "reward.model.path": raw}
    ),
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
    "stop_token": _only(
        "eos", "null", "none", why="use rollout.stop for texts that end a response"
    ),
}
