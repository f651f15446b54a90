"""Rules about what the update leaves out: tokens and sequences that the correction drops.

Owns what of this cannot work. Must not look at files.
"""

from __future__ import annotations

from collections.abc import Iterator

from ppo.config import Config, Problem

_CORRECTION = "algorithm.rollout_correction"


def filtering_problems(config: Config) -> list[Problem]:
    """Everything of this kind that cannot work."""
    return [*_bounds(config), *_bypass(config)]


def _bounds(config: Config) -> Iterator[Problem]:
    correction = config.algorithm.rollout_correction
    icepop = correction.icepop
    if icepop is not None and (len(icepop) != 2 or icepop[0] >= icepop[1]):
        rule = "must be [lo, hi] with lo < hi"
        yield Problem(f"{_CORRECTION}.icepop", icepop, rule, "use [0.5, 5.0]")
    try:
        _ = correction.rejections
    except ValueError as error:
        fix = "use {seq_mean_k1: [0.999, 1.001]} or so"
        yield Problem(f"{_CORRECTION}.reject", correction.reject, str(error), fix)


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
