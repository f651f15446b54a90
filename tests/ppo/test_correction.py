"""What is known of a batch before its updates, by which a guard can leave them out."""

import math

import pytest
import torch

from ppo.batch.samples import RolloutBatch
from ppo.check.filtering import filtering_problems
from ppo.config import BATCH_METRICS, Config, load_config
from ppo.data.dataset import Prompt
from ppo.engines.contract import Completion
from ppo.guards.guard import Guard
from ppo.kl import make_kl_controller
from ppo.metrics import Metrics
from ppo.update import add_advantages, needs_old_logprobs
from tests.ppo.batches import make_batch

OF_SCORING = {"reward/failed", "reward/timeout"}
"""the scorer's, which tests/ppo/rollout/test_scoring.py looks at"""
KEYS = ("algorithm.adv_estimator=grpo", "rollout.n=2", "algorithm.use_kl_in_reward=true")
RULES = ", ".join(f"{{metric: {m}, above: 1e9, action: skip_update}}" for m in BATCH_METRICS)


def config_of(*overrides: str) -> Config:
    return load_config("ppo_tiny.yaml", [*KEYS, f"guards.rules=[{RULES}]", *overrides])


def batch_of() -> RolloutBatch:
    """Two samples of a prompt; ratios of trainer and engine: 1, 0.5 | 4, 1, 1."""
    engine = ([0.5, 0.5], [0.2, 0.9, 0.4])
    logprobs = [[math.log(p) for p in sample] for sample in engine]
    completions = [Completion([5] * len(x), x, "stop") for x in logprobs]
    batch = make_batch([Prompt(0, [7], "", None, {}, "")], completions, scores=[0.0, 1.0])
    batch.old_logprobs = torch.tensor([[0.5, 0.25, 1.0], [0.8, 0.9, 0.4]]).log()
    batch.ref_logprobs = batch.old_logprobs - 0.1
    return batch


@pytest.mark.parametrize("keys", ["rollout_is=token", "reject={token_k1: [0.1, 10]}"])
def test_every_metric_that_a_guard_may_leave_updates_out_by_is_known_before_them(keys):
    config = config_of(f"algorithm.rollout_correction.{keys}")
    assert filtering_problems(config) == []
    batch, metrics = batch_of(), Metrics()
    add_advantages(batch, config, make_kl_controller(config.algorithm.kl_ctrl), metrics)
    assert set(BATCH_METRICS) - OF_SCORING <= metrics.known.keys()
    assert metrics.known["rollout_corr/is_mean"] == pytest.approx(7.5 / 5)
    rule = "[{metric: rollout_corr/is_mean, above: 1.4, action: skip_update}]"
    guard = Guard(config_of(f"guards.rules={rule}").guards.all_rules())
    assert guard.before_update(1, metrics.known)


@pytest.mark.parametrize(
    ("rules", "is_needed"),
    [
        ("[]", False),
        ("[{metric: actor/ref_kl, above: 0.1, action: [warn, scale_kl_coef 1.5]}]", False),
        ("[{metric: actor/ref_kl, above: 0.1, action: skip_update}]", True),
    ],
)
def test_old_log_probs_are_computed_where_a_guard_decides_by_the_kl_before_the_updates(
    rules, is_needed
):
    config = config_of(
        *("algorithm.use_kl_in_reward=false", "actor.use_kl_loss=true", f"guards.rules={rules}")
    )
    assert needs_old_logprobs(config, num_mini_batches=1) == is_needed
