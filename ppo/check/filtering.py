"""Rules about what is left out of training: groups, tokens that engine and trainer disagree about,
updates that a guard leaves out.

Owns what of this cannot work, and what is no rule of a guard. Must not look at files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ppo.config import Config, Problem, parse_rule
from ppo.rewards.contract import RewardError
from ppo.rewards.function import functions_of

_CORRECTION = "algorithm.rollout_correction"


def filtering_problems(config: Config) -> list[Problem]:
    """Everything of this kind that cannot work."""
    return [
        *_bounds(config),
        *_bypass(config),
        *_groups(config),
        *_overlong(config),
        *_guards(config),
    ]


def _bounds(config: Config) -> Iterator[Problem]:
    correction = config.algorithm.rollout_correction
    icepop = correction.icepop
    if icepop is not None and not _holds_one(icepop):
        rule = (
            "must be [lo, hi] with lo < hi and 1, the ratio where engine and trainer agree, between"
        )
        yield Problem(f"{_CORRECTION}.icepop", icepop, rule, "use [0.5, 5.0]")
    try:
        _ = correction.rejections
    except ValueError as error:
        fix = "use {seq_mean_k1: [0.999, 1.001]} or so"
        yield Problem(f"{_CORRECTION}.reject", correction.reject, str(error), fix)


def _holds_one(bounds: Sequence[float]) -> bool:
    return len(bounds) == 2 and bounds[0] <= 1 <= bounds[1] and bounds[0] < bounds[1]


def _bypass(config: Config) -> Iterator[Problem]:
    correction, loss_mode = config.algorithm.correction, config.actor.policy_loss.loss_mode
    preset = config.algorithm.rollout_correction.preset
    has_ratio = loss_mode != "gpg"
    if preset is not None and "pg_" in preset and has_ratio:
        yield Problem(
            f"{_CORRECTION}.preset",
            preset,
            f"is of a policy gradient without a ratio, and actor.policy_loss.loss_mode = "
            f"{loss_mode} has one",
            "set actor.policy_loss.loss_mode=gpg",
        )
    elif correction.bypass_old_logprob and correction.weighs and has_ratio:
        key = "rollout_is" if correction.rollout_is is not None else "icepop"
        yield Problem(
            f"{_CORRECTION}.{key}",
            getattr(correction, key),
            f"with bypass_old_logprob the ratio of actor.policy_loss.loss_mode = {loss_mode} is "
            "that of the policy and the engine: a weight would count the mismatch twice",
            "leave it out, or set actor.policy_loss.loss_mode=gpg",
        )


def _groups(config: Config) -> Iterator[Problem]:
    keys, data = config.algorithm.filter_groups, config.data
    if not keys.enable or config.trainer.val_only:
        return
    if config.rollout.n == 1:
        rule = "algorithm.filter_groups compares the responses of a prompt"
        yield Problem("rollout.n", 1, rule, "use rollout.n=8 or so")
    if not config.uses_function and not config.reward.model.enable:
        rule = "nothing scores: no prompt's responses differ"
        yield Problem("algorithm.filter_groups.enable", True, rule, "leave it out")
    if keys.metric == "seq_final_reward" and config.algorithm.charges_kl:
        yield Problem(
            "algorithm.filter_groups.metric",
            keys.metric,
            "has the KL penalty of algorithm.use_kl_in_reward in it, which is not known yet when "
            "groups are chosen",
            "use seq_reward",
        )
    entries = _known_entries(config)
    if not keys.is_of_score and entries is not None and keys.metric not in entries:
        yield Problem(
            "algorithm.filter_groups.metric",
            keys.metric,
            "the reward gives no such entry",
            f"use {' or '.join(['score', *entries])}",
        )
    most = keys.max_num_gen_batches * data.gen_batch_size
    if 0 < most < data.train_batch_size:
        yield Problem(
            "algorithm.filter_groups.max_num_gen_batches",
            keys.max_num_gen_batches,
            f"rounds of data.gen_batch_size = {data.gen_batch_size} prompts never make "
            f"data.train_batch_size = {data.train_batch_size}",
            f"use {-(-data.train_batch_size // data.gen_batch_size)} or more, or 0",
        )
    if keys.surplus == "keep" and data.gen_batch_size > data.train_batch_size:
        yield Problem(
            "algorithm.filter_groups.surplus",
            keys.surplus,
            f"data.gen_batch_size = {data.gen_batch_size} is more than data.train_batch_size = "
            f"{data.train_batch_size}: groups would wait for longer than one iteration",
            "use drop, or a smaller data.gen_batch_size",
        )


def _known_entries(config: Config) -> list[str] | None:
    """What may have to differ besides the score; None where a function of the user's decides."""
    settings = config.reward.function
    if not config.uses_function:
        return []
    if settings.path is not None and settings.style == "verl":  # it may return a dict
        return None
    try:
        functions = functions_of(settings)
    except RewardError:  # said by ppo/check/rules.py
        return None
    return ["acc"] if len(functions) == 1 else [function.label for function in functions]


def _overlong(config: Config) -> Iterator[Problem]:
    buffer, longest = config.reward.overlong_buffer, config.data.max_response_length
    if buffer.len is not None and buffer.len > longest:
        rule = f"must be at most data.max_response_length ({longest})"
        yield Problem("reward.overlong_buffer.len", buffer.len, rule)


def _guards(config: Config) -> Iterator[Problem]:
    """Rules that are none, and those that would leave out an update by what is not known then."""
    for number, raw in enumerate(config.guards.rules):
        path = f"guards.rules[{number}]"
        try:
            rule = parse_rule(raw, max_fires=config.guards.max_fires)
        except ValueError as error:
            yield Problem(path, raw, str(error))
            continue
        if rule.is_of_batch and (why := _why_unknown(rule.metric, config)) is not None:
            yield Problem(path, raw, f"{rule.metric} is not known before the updates: {why}")


def _why_unknown(metric: str, config: Config) -> str | None:
    """Why no iteration has this metric of BATCH_METRICS before its updates; None: each has."""
    algorithm = config.algorithm
    if metric == "actor/ref_kl" and not config.ref_enabled:
        return "there is no reference; set actor.use_kl_loss=true or algorithm.use_kl_in_reward"
    if metric == "actor/reward_kl_penalty" and not algorithm.charges_kl:
        return "algorithm.use_kl_in_reward is false"
    if metric == "reward/alone" and not algorithm.needs.siblings:
        return f"algorithm.adv_estimator = {algorithm.adv_estimator} compares no samples"
    if not metric.startswith("rollout_corr/"):
        return None
    keys = algorithm.correction
    if keys.bypass_old_logprob:
        return f"with {_CORRECTION}.bypass_old_logprob they themselves compare engine and trainer"
    if not (keys.weighs or keys.rejects):
        return f"{_CORRECTION} neither weighs nor rejects; set {_CORRECTION}.rollout_is=token or so"
    return None
