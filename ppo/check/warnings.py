"""Options without effect and likely mistakes: a run goes on, but says so once.

Owns what is only odd; what cannot work is in ppo/check/rules.py. Must not look at files.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from ppo.config import (
    ENGINE_TRAITS,
    ESTIMATOR_NEEDS,
    KEYS_OF_LOSS_MODES,
    ActorConfig,
    AlgorithmConfig,
    Config,
    CriticModelConfig,
    DifficultyConfig,
    EarlyStopConfig,
    FilterGroupsConfig,
    ModelConfig,
    RolloutConfig,
    unusual_values,
)


def config_warnings(config: Config, *, world_size: int) -> list[str]:
    """One line for each option that has no effect, or an effect that few people want."""
    return [
        *_training(config),
        *_lora(config),
        *_micro_batches(config),
        *_algorithm(config),
        *_groups(config),
        *_data(config),
        *_rollout(config),
        *_sizes(config, world_size),
        *unusual_values(config),
    ]


def _training(config: Config) -> Iterator[str]:
    if config.model.trust_remote_code:
        yield "model.trust_remote_code = true: Python code of the model runs on every rank"
    model = config.model
    if model.enable_activation_offload and model.policy == "none":
        yield (
            "model.enable_activation_offload has no effect without layers that are recomputed "
            "(model.enable_gradient_checkpointing, model.checkpoint_policy)"
        )
    if model.checkpoint_policy == "selective" and model.policy == "none":
        yield (
            "model.checkpoint_policy = selective has no effect beside "
            "model.enable_gradient_checkpointing = false"
        )
    whole = [role for role in config.models.values() if role.is_trained and role.lora is None]
    if config.model.dtype != "float32" and whole:
        yield (
            f"model.dtype = {config.model.dtype}: master weights, and Adam moments without "
            "optim.state_dtype=float32, have no more digits than that, and small updates are "
            "rounded away"
        )
    if not config.algorithm.needs.critic:
        if config.critic.enable:
            estimator = config.algorithm.adv_estimator
            yield f"critic.enable has no effect: adv_estimator {estimator} has no critic"
        if config.critic.normalize_returns:
            yield "critic.normalize_returns has no effect without a critic"
        if config.trainer.critic_warmup:
            yield "trainer.critic_warmup has no effect without a critic"
    steps = config.trainer.total_training_steps
    if config.critic_enabled and steps is not None and config.trainer.critic_warmup >= steps:
        yield "trainer.critic_warmup leaves the actor none of trainer.total_training_steps"
    if config.trainer.save_freq < 0 and not config.trainer.val_only:
        yield "trainer.save_freq = -1: no checkpoint is written, not at the end nor at a stop"
    for name in _trained(config):
        optim, fsdp = getattr(config, name).optim, getattr(config, name).fsdp
        contents = getattr(config, name).checkpoint.save_contents
        if "optimizer" not in contents:
            yield (
                f"{name}.checkpoint.save_contents = {contents}: without optimizer a resumed run "
                "starts with new Adam moments"
            )
        if optim.lr_warmup_steps and optim.lr_warmup_steps_ratio:
            yield f"{name}.optim.lr_warmup_steps_ratio has no effect beside lr_warmup_steps"
        if optim.min_lr_ratio and optim.lr_scheduler_type == "constant":
            yield f"{name}.optim.min_lr_ratio has no effect with lr_scheduler_type constant"
        others = (fsdp.param_offload, fsdp.optimizer_offload, fsdp.optimizer_on_host)
        if fsdp.offload_policy and any(others):
            yield (
                f"{name}.fsdp.param_offload, optimizer_offload and optimizer_on_host have no "
                "effect beside offload_policy"
            )
        elif fsdp.optimizer_on_host and fsdp.optimizer_offload:
            yield f"{name}.fsdp.optimizer_offload has no effect beside optimizer_on_host"
        if fsdp.mixed_precision.param_dtype == "float16":
            yield f"{name}.fsdp.mixed_precision.param_dtype float16: there is no loss scaling"


def _lora(config: Config) -> Iterator[str]:
    model, critic = config.model, config.critic.model
    yield from _adapters("model", model, ModelConfig(path=model.path))
    if config.critic_enabled:
        yield from _adapters("critic.model", critic, model)


def _adapters(
    section: str, keys: ModelConfig | CriticModelConfig, default: ModelConfig
) -> Iterator[str]:
    if keys.lora_rank == 0:
        for name in ("alpha", "target_modules", "exclude_modules", "dropout"):
            if getattr(keys, f"lora_{name}") != getattr(default, f"lora_{name}"):
                yield f"{section}.lora_{name} has no effect without {section}.lora_rank"
    elif keys.lora_dropout:
        yield (
            f"{section}.lora_dropout = {keys.lora_dropout:g}: updates draw at random, so the first "
            "ratio is not 1, and results depend on how work is cut"
        )


def _micro_batches(config: Config) -> Iterator[str]:
    for name in _trained(config):
        section = getattr(config, name)
        if section.use_dynamic_bsz and section.ppo_micro_batch_size_per_gpu is not None:
            yield f"{name}.ppo_micro_batch_size_per_gpu has no effect with use_dynamic_bsz"


def _trained(config: Config) -> list[str]:
    """Sections of the models that are trained."""
    return [role.section for role in config.models.values() if role.is_trained]


def _algorithm(config: Config) -> Iterator[str]:
    algorithm, control = config.algorithm, config.algorithm.kl_ctrl
    estimator = algorithm.adv_estimator
    default = AlgorithmConfig()
    if config.reward.normalize and estimator == "grpo" and algorithm.norm_adv_by_std_in_grpo:
        yield "reward.normalize has hardly an effect with grpo, which normalises in each group"
    for key in sorted({key for needs in ESTIMATOR_NEEDS.values() for key in needs.keys}):
        unread = key not in algorithm.needs.keys
        if unread and getattr(algorithm, key) != getattr(default, key):
            yield f"algorithm.{key} has no effect with adv_estimator {estimator}"
    if algorithm.charges_kl and config.actor.use_kl_loss:
        yield "algorithm.use_kl_in_reward and actor.use_kl_loss: the KL penalty counts twice"
    if algorithm.charges_kl and control.type == "fixed" and control.kl_coef == 0:
        yield (
            "algorithm.kl_ctrl.kl_coef = 0: the reference model only measures; "
            "algorithm.use_kl_in_reward=false saves it"
        )
    if config.actor.use_kl_loss and config.actor.kl_loss_coef == 0:
        yield "actor.kl_loss_coef = 0: the KL loss only measures"
    yield from _unread_of_actor(config.actor)
    if not algorithm.charges_kl and control.type != "fixed":
        unless = f"with adv_estimator {estimator}"
        if not algorithm.use_kl_in_reward:
            unless = "without algorithm.use_kl_in_reward"
        yield f"algorithm.kl_ctrl.type has no effect {unless}"
    if not config.ref_enabled and config.ref.model.path != config.model.path:
        yield "ref.model.path has no effect: nothing is compared with a reference"


def _unread_of_actor(actor: ActorConfig) -> Iterator[str]:
    """Keys of the loss that are not read as it is."""
    default, mode = ActorConfig(), actor.policy_loss.loss_mode
    for key in ("kl_loss_coef", "kl_loss_type"):
        if not actor.use_kl_loss and getattr(actor, key) != getattr(default, key):
            yield f"actor.{key} has no effect without actor.use_kl_loss"
    for key, modes in KEYS_OF_LOSS_MODES.items():
        usual = attrgetter(key)(default)
        if usual is None:  # it follows
            usual = actor.clip_ratio
        if mode not in modes and attrgetter(key)(actor) != usual:
            yield f"actor.{key} has no effect with actor.policy_loss.loss_mode {mode}"


def _groups(config: Config) -> Iterator[str]:
    keys, data, reward = config.algorithm.filter_groups, config.data, config.reward
    default, has_penalty = FilterGroupsConfig(), reward.overlong_buffer.len is not None
    if not keys.enable:
        if data.gen_batch_size != data.train_batch_size:
            yield "data.gen_batch_size has no effect without algorithm.filter_groups.enable"
        if keys != default:
            yield "algorithm.filter_groups has no effect without enable"
    elif reward.manager == "dapo" and has_penalty and keys.is_of_score:
        yield (
            "algorithm.filter_groups.metric: with reward.overlong_buffer lengths alone make scores "
            "differ; use acc, or another entry of the reward's dict"
        )
    threshold = config.algorithm.rollout_correction.rollout_is_threshold
    if threshold is not None and config.algorithm.correction.rollout_is is None:
        yield "algorithm.rollout_correction.rollout_is_threshold has no effect without rollout_is"
    if has_penalty != (reward.manager == "dapo"):
        yield "reward.overlong_buffer.len and reward.manager=dapo have no effect without each other"


def _data(config: Config) -> Iterator[str]:
    data = config.data
    if data.filter_overlong_prompts and data.truncation != "error":
        yield "data.truncation has no effect with data.filter_overlong_prompts"
    if data.custom_cls.name is not None and data.custom_cls.path is None:
        yield "data.custom_cls.name has no effect without data.custom_cls.path"
    function, model = config.reward.function, config.reward.model
    if model.path is not None and not model.enable:
        yield "reward.model.path has no effect without reward.model.enable"
    if config.reward.weights.model != 1 and not model.enable:
        yield "reward.weights.model has no effect without reward.model.enable"
    if function.path is None and (function.kwargs or function.name != ["compute_score"]):
        yield "reward.function.name and kwargs have no effect without reward.function.path"
    if data.difficulty.pool is None and data.difficulty != DifficultyConfig():
        yield "data.difficulty.visits has no effect without data.difficulty.pool"
    if data.difficulty.pool == 1:
        yield "data.difficulty.pool = 1: prompts of the pool come as often as others"
    trainer = config.trainer
    early, least = trainer.early_stop, trainer.test_freq
    if early.metric is None and early != EarlyStopConfig():
        yield "trainer.early_stop.patience has no effect without trainer.early_stop.metric"
    if early.metric is not None and early.metric.removeprefix("-").startswith("val-") and least < 1:
        yield (
            f"trainer.early_stop.metric has no effect with trainer.test_freq = {least}: nothing is "
            "validated between the first and the last iteration"
        )
    if config.trainer.val_before_train and not config.val_sets and config.trainer.keep_best:
        yield "trainer.keep_best: there are no data.val_files, only training metrics exist"


def _rollout(config: Config) -> Iterator[str]:
    rollout = config.rollout
    named = {f"data.val_sets.{name}.n": config.val_sets[name] for name in config.data.val_sets}
    for key, val in ({"rollout.val_kwargs.n": rollout.val_kwargs} | named).items():
        if val.temperature == 0 and val.n != 1:
            yield f"{key} > 1 at temperature 0 makes equal responses"
    engine, default = config.planned_engine, RolloutConfig()
    for key in ENGINE_TRAITS[engine].unused:
        if getattr(rollout, key) != getattr(default, key):
            yield f"rollout.{key} has no effect with rollout.engine {engine}"
    if not rollout.has_episodes and rollout.episode != default.episode:
        yield "rollout.episode has no effect without rollout.episode.path"
    if config.parallel.align_to_rollout and rollout.tensor_model_parallel_size == 1:
        yield ("parallel.align_to_rollout has no effect with rollout.tensor_model_parallel_size 1")


def _sizes(config: Config, world_size: int) -> Iterator[str]:
    longest, sp = config.data.max_length, config.actor.ulysses_sequence_parallel_size
    small = [f"{key} = {budget}" for key, budget in _budgets(config) if budget * sp < longest]
    if small:
        yield (
            f"{', '.join(small)}: {'' if sp == 1 else f'times sp {sp} '}less than the longest "
            f"sequence ({longest} tokens): such a sequence gets a micro-batch of its own"
        )
    for name in _trained(config):
        size = getattr(config, name).ppo_mini_batch_size
        sequences, groups = size * config.rollout.n, world_size // sp
        if sequences < groups:
            yield (
                f"{name}.ppo_mini_batch_size x rollout.n = {sequences} sequences: less than the "
                f"{groups} sp groups, some ranks compute nothing"
            )


def _budgets(config: Config) -> Iterator[tuple[str, int]]:
    """The token budgets that the run uses."""
    for name in _trained(config):
        section = getattr(config, name)
        if section.use_dynamic_bsz:
            yield f"{name}.ppo_max_token_len_per_gpu", section.ppo_max_token_len_per_gpu
    if config.ref_enabled:
        budget = config.ref.log_prob_max_token_len_per_gpu
        follows = budget == config.actor.log_prob_max_token_len_per_gpu
        yield f"{'actor' if follows else 'ref'}.log_prob_max_token_len_per_gpu", budget
    if config.reward.model.enable:
        yield "reward.model.max_token_len_per_gpu", config.reward.model.max_token_len_per_gpu
