"""The choices that the configuration offers are those of the tables that carry them out."""

from dataclasses import fields
from typing import get_args, get_type_hints

from ppo.config import ENGINE_TRAITS, ESTIMATOR_NEEDS, ActorConfig, AlgorithmConfig, RolloutConfig
from ppo.estimators import ESTIMATORS
from ppo.kl import ESTIMATES
from ppo.losses import AggregationMode
from ppo.policy_losses import POLICY_LOSSES


def choices(section: type, key: str) -> tuple[str, ...]:
    return get_args(get_type_hints(section)[key])


def test_every_estimator_has_its_needs_and_its_function():
    names = choices(AlgorithmConfig, "adv_estimator")
    assert names == tuple(ESTIMATORS) == tuple(ESTIMATOR_NEEDS)
    keys = {field.name for field in fields(AlgorithmConfig)}
    assert all(set(needs.keys) <= keys for needs in ESTIMATOR_NEEDS.values())


def test_every_kind_of_kl_has_its_formula_and_every_kind_of_a_loss_its_plus():
    assert choices(AlgorithmConfig, "kl_penalty") == tuple(ESTIMATES)
    plus = (f"{kind}+" for kind in ESTIMATES)
    full = ("full", "full_forward")
    assert choices(ActorConfig, "kl_loss_type") == (*ESTIMATES, *plus, *full)


def test_every_loss_and_aggregation_has_its_formula():
    assert choices(type(ActorConfig().policy_loss), "loss_mode") == tuple(POLICY_LOSSES)
    assert choices(ActorConfig, "loss_agg_mode") == get_args(AggregationMode)


def test_every_engine_has_its_traits():
    assert choices(RolloutConfig, "engine") == ("auto", *ENGINE_TRAITS)
    keys = {field.name for field in fields(RolloutConfig)}
    assert all(set(traits.unused) <= keys for traits in ENGINE_TRAITS.values())
