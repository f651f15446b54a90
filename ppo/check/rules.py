"""Rules that concern several keys of a configuration, or the ranks: what cannot work.

What is only odd is in ppo/check/warnings.py, what is missing on this machine in ppo/check/files.py.
Must not look at files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ppo.check.episodes import episode_problems
from ppo.check.filtering import filtering_problems
from ppo.check.sparing import sparing_problems
from ppo.config import Config, FsdpConfig, Problem
from ppo.rewards.contract import RewardError
from ppo.rewards.function import functions_of
from sharding.dims import ParallelDims

# of apply_chat_template: they change what it returns, not what the template sees
_CHAT_OPTIONS_OF_OURS = {
    *("tokenize", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("add_generation_prompt", "continue_final_message", "conversation", "tokenizer_kwargs"),
    *("padding", "truncation", "max_length"),
}
_DEGREE_KEYS = {
    "sp": "actor.ulysses_sequence_parallel_size",
    "fsdp_size": "actor.fsdp.fsdp_size",
    "rollout_tp": "rollout.tensor_model_parallel_size",
}


def check_config(config: Config, *, world_size: int, ranks_per_node: int) -> list[Problem]:
    """Everything that cannot work with this many ranks; empty when all is well."""
    dims = config.dims(world_size, ranks_per_node)
    return [
        *_degrees(config, dims),
        *sparing_problems(config),
        *_batch_sizes(config),
        *_estimator(config),
        *_lengths(config),
        *_pairs(config),
        *filtering_problems(config),
        *_rows_and_samples(config),
        *_rewards(config),
        *episode_problems(config),
        *_validation(config),
    ]


def _degrees(config: Config, dims: ParallelDims) -> Iterator[Problem]:
    for text in dims.problems():
        head, _, rule = text.partition(": ")
        name, _, value = head.partition(" ")
        path = _DEGREE_KEYS.get(name, "")
        if name == "fsdp_size" and int(value) != (wrote := config.actor.fsdp).fsdp_size:
            yield Problem("actor.fsdp.sharding_strategy", wrote.sharding_strategy, rule)
        else:
            yield Problem(path, int(value), rule) if path else Problem("", None, text)
    if dims.problems():
        return
    for role in config.models.values():
        name, fsdp = role.section, role.fsdp
        if name != "actor":
            own = ParallelDims(
                world_size=dims.world_size,
                ranks_per_node=dims.ranks_per_node,
                fsdp_size=fsdp.shard_size(dims.world_size),
                sp=dims.sp,
            )
            if own.shard_size != dims.shard_size:
                yield Problem(
                    f"{name}.fsdp.fsdp_size",
                    fsdp.fsdp_size,
                    f"must be actor.fsdp.fsdp_size ({dims.shard_size}): all models share one mesh",
                    "leave it out",
                )
        yield from _strategy(name, fsdp, dims)
    sp = config.critic.ulysses_sequence_parallel_size
    if config.critic_enabled and sp != dims.sp:
        yield Problem(
            "critic.ulysses_sequence_parallel_size",
            sp,
            f"must be actor.ulysses_sequence_parallel_size ({dims.sp}): all models share one mesh",
            "leave it out",
        )


def _strategy(name: str, fsdp: FsdpConfig, dims: ParallelDims) -> Iterator[Problem]:
    """An explicit sharding_strategy must be what the sizes amount to."""
    wanted, size = fsdp.sharding_strategy, dims.shard_size
    possible = {dims.strategy}
    if dims.world_size == 1:
        possible |= {"NO_SHARD", "FULL_SHARD", "SHARD_GRAD_OP"}
    elif not fsdp.reshards and size > 1:
        possible = (possible - {"FULL_SHARD"}) | {"SHARD_GRAD_OP"}
    if wanted is None or wanted in possible:
        return
    sizes = {"NO_SHARD": 1, "FULL_SHARD": dims.world_size, "SHARD_GRAD_OP": dims.world_size}
    fix = f"set {name}.fsdp.fsdp_size={sizes.get(wanted, '1 < F < all ranks')}"
    if sizes.get(wanted) == size:
        fix = f"set {name}.fsdp.reshard_after_forward=true"
    yield Problem(
        f"{name}.fsdp.sharding_strategy",
        wanted,
        f"contradicts {name}.fsdp.fsdp_size = {fsdp.fsdp_size} ({size} of {dims.world_size} ranks)"
        f" and reshard_after_forward = {str(fsdp.reshard_after_forward).lower()}, which amount to "
        + " or ".join(sorted(possible)),
        f"{fix}, or leave the strategy out",
    )


def _batch_sizes(config: Config) -> Iterator[Problem]:
    batch = config.data.train_batch_size
    sections = [("actor", config.actor.ppo_mini_batch_size)]
    if config.critic_enabled and config.critic.ppo_mini_batch_size != sections[0][1]:
        sections.append(("critic", config.critic.ppo_mini_batch_size))
    for name, size in sections:
        if batch % size:
            near = [d for d in range(1, batch + 1) if batch % d == 0]
            lower = max((d for d in near if d <= size), default=1)
            upper = min((d for d in near if d > size), default=batch)
            yield Problem(
                f"{name}.ppo_mini_batch_size",
                size,
                f"must divide data.train_batch_size ({batch})",
                f"use {lower} or {upper}" if lower != upper else f"use at most {batch}",
            )


def _estimator(config: Config) -> Iterator[Problem]:
    estimator, needs = config.algorithm.adv_estimator, config.algorithm.needs
    if needs.critic and config.critic.enable is False:
        yield Problem(
            "critic.enable",
            False,
            f"algorithm.adv_estimator {estimator} needs a critic",
            "leave it out, or use algorithm.adv_estimator=grpo",
        )
    if needs.siblings and config.rollout.n == 1 and not config.trainer.val_only:
        yield Problem(
            "rollout.n",
            1,
            f"algorithm.adv_estimator {estimator} compares the responses of a prompt",
            "use rollout.n=8 or so",
        )
    if needs.teacher and config.ref.model.path == config.model.path:
        yield Problem(
            "ref.model.path",
            config.ref.model.path,
            f"algorithm.adv_estimator {estimator} learns from a teacher, and this is model.path",
            "name another model with the same tokenizer",
        )
    if config.rollout.temperature == 0 and not config.trainer.val_only:
        yield Problem(
            "rollout.temperature",
            0.0,
            "training needs samples, and log-probs are of z / T",
            "use 1.0; validation has its own in rollout.val_kwargs.temperature",
        )


def _lengths(config: Config) -> Iterator[Problem]:
    if config.rollout.max_model_len < config.data.max_length:
        yield Problem(
            "rollout.max_model_len",
            config.rollout.max_model_len,
            f"must be at least data.max_prompt_length + data.max_response_length "
            f"({config.data.max_length})",
            "leave it out",
        )
    if config.actor.ulysses_sequence_parallel_size > 1 and not config.model.use_remove_padding:
        yield Problem(
            "model.use_remove_padding",
            False,
            "actor.ulysses_sequence_parallel_size > 1 cuts packed rows",
            "leave it out",
        )


def _pairs(config: Config) -> Iterator[Problem]:
    for name in ("actor", "critic"):
        betas = getattr(config, name).optim.betas
        if len(betas) != 2:
            yield Problem(f"{name}.optim.betas", betas, "must be two numbers", "use [0.9, 0.999]")
    loss = config.actor.policy_loss
    if loss.loss_mode == "clip_cov" and loss.clip_cov_lb >= loss.clip_cov_ub:
        yield Problem(
            "actor.policy_loss.clip_cov_lb",
            loss.clip_cov_lb,
            f"must be below actor.policy_loss.clip_cov_ub ({loss.clip_cov_ub})",
        )
    trainer, rollout = config.trainer, config.rollout
    if trainer.deterministic and trainer.device == "cuda" and rollout.engine_process == "rank":
        yield Problem(
            "rollout.engine_process",
            "rank",
            "with trainer.deterministic SGLang replaces the matrix products of its process, which "
            "is the trainer's",
            "use rollout.engine_process=host",
        )
    control = config.algorithm.kl_ctrl
    if control.type != "fixed" and control.min > control.max:
        yield Problem(
            "algorithm.kl_ctrl.min",
            control.min,
            f"must not be above algorithm.kl_ctrl.max ({control.max})",
        )


def _rows_and_samples(config: Config) -> Iterator[Problem]:
    data, rollout = config.data, config.rollout
    if not data.train_files:
        yield Problem("data.train_files", [], "must name at least one file", "or use tiny")
    if data.custom_cls.path is not None and data.custom_cls.name is None:
        yield Problem("data.custom_cls.name", None, "is required with data.custom_cls.path")
    for name in {"sglang", "vllm", "trtllm"}.intersection(rollout.engine_kwargs):
        yield Problem(
            f"rollout.engine_kwargs.{name}",
            rollout.engine_kwargs[name],
            "is a key of another trainer",
            "write what stands in it into rollout.engine_kwargs, sglang.Engine's options"
            if name == "sglang"
            else "rollout.engine_kwargs are sglang.Engine's options; remove it",
        )
    ours = sorted(_CHAT_OPTIONS_OF_OURS & data.apply_chat_template_kwargs.keys())
    if ours:
        yield Problem(
            "data.apply_chat_template_kwargs",
            data.apply_chat_template_kwargs,
            f"must not set {', '.join(ours)}: a prompt is rendered as text, with the generation "
            "prompt, and tokenized afterwards",
            "leave it out",
        )
    if data.mix and not any(data.mix.values()):
        yield Problem("data.mix", data.mix, "every weight is 0: there are no prompts")


def _rewards(config: Config) -> Iterator[Problem]:
    function, model, weights = config.reward.function, config.reward.model, config.reward.weights
    if function.style == "trl" and function.path is None:
        yield Problem("reward.function.style", "trl", "needs reward.function.path")
    try:
        functions = functions_of(function)
    except RewardError as error:
        yield Problem("", None, str(error))
        return
    if model.enable and model.path is None:
        yield Problem(
            "reward.model.path",
            None,
            "is required with reward.model.enable",
            "name a sequence classification model with one label",
        )
    counts = {
        "function": config.uses_function
        and weights.function != 0
        and any(function.weight for function in functions),
        "model": model.enable and weights.model != 0,
    }
    if config.algorithm.needs_reward and not any(counts.values()):
        yield Problem("reward.weights", None, "every score has weight 0: nothing is rewarded")


def _validation(config: Config) -> Iterator[Problem]:
    if config.trainer.val_only and not config.val_sets:
        yield Problem("data.val_files", [], "trainer.val_only needs validation data")
    named = {
        "trainer.keep_best": config.trainer.keep_best,
        "trainer.early_stop.metric": config.trainer.early_stop.metric,
    }
    for key, metric in named.items():
        if (metric or "").removeprefix("-").startswith("val-") and not config.val_sets:
            yield Problem(key, metric, "needs data.val_files or data.val_sets")
    room = config.rollout.max_model_len - config.data.max_prompt_length
    for name, val in config.data.val_sets.items():
        path, longest = f"data.val_sets.{name}", val.max_response_length or 0
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            rule = "the name of a validation set has letters, digits, - and _"
            yield Problem(path, None, rule, "it names metrics and files of samples")
        if not val.files:
            yield Problem(f"{path}.files", [], "must name at least one file")
        if longest > room:
            yield Problem(
                f"{path}.max_response_length",
                longest,
                f"must be at most rollout.max_model_len - data.max_prompt_length ({room})",
                f"lower it, or set rollout.max_model_len={config.data.max_prompt_length + longest}",
            )
