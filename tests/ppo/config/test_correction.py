"""Presets of the rollout correction, and what is given beside them."""

import math

import pytest

from ppo.config import CORRECTION_PRESETS, load_config


def correction(*overrides: str):
    keys = [f"algorithm.rollout_correction.{text}" for text in overrides]
    return load_config("ppo_tiny.yaml", keys).algorithm.correction


def test_a_preset_of_the_rollout_correction_fills_in_what_is_not_given():
    plain = correction()
    assert not plain.weighs and not plain.rejects and not plain.bypass_old_logprob
    found = correction("preset=decoupled_seq_is_rs")
    assert (found.rollout_is, found.rollout_is_threshold) == ("sequence", 2.0)
    assert found.rejections == {"seq_sum_k1": (0.5, 2.0)} and not found.bypass_old_logprob
    found = correction("preset=pg_rs")
    assert found.bypass_old_logprob and found.rollout_token_veto_threshold == 1e-4
    assert found.rejections == {"seq_mean_k1": (0.999, 1.001)} and not found.weighs
    assert correction("preset=decoupled_token_icepop").icepop == [0.5, 5.0]
    assert correction("preset=disabled") == plain


def test_a_key_that_is_given_beside_a_preset_wins():
    found = correction(
        *("preset=bypass_ppo_clip_geo_rs", "bypass_old_logprob=false"),
        *("reject={seq_mean_k1: 1.01, token_k3: 4}", "rollout_is=token"),
    )
    assert not found.bypass_old_logprob and found.rollout_is == "token"
    assert found.rejections["seq_mean_k1"] == pytest.approx((1 / 1.01, 1.01))
    assert found.rejections["token_k3"] == (-math.inf, 4.0)
    assert correction("preset=decoupled_geo_rs", "reject={}").rejections == {}
    assert (
        correction("preset=decoupled_token_is", "rollout_is_threshold=5").rollout_is_threshold == 5
    )


def test_every_preset_of_the_rollout_correction_has_bounds_that_are_right():
    for name in CORRECTION_PRESETS:
        found = correction(f"preset={name}")
        assert (found.preset, found.weighs or found.rejects or found.bypass_old_logprob) == (
            *(None, name != "disabled"),
        )
        assert all(low < high for low, high in found.rejections.values())
        assert found.bypass_old_logprob == ("bypass" in name or name.startswith("pg_"))
