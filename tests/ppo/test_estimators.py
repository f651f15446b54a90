"""Which samples an estimator compares, and what becomes of the others."""

import statistics
from typing import Any

import pytest
import torch

from ppo.batch.samples import RolloutBatch
from ppo.config import ESTIMATOR_NEEDS, AlgorithmConfig
from ppo.data.dataset import Prompt
from ppo.engines.contract import Completion
from ppo.estimators import ESTIMATORS, estimate
from ppo.kl import token_rewards
from tests.ppo.batches import make_batch, without


def make(scores: list[float | None], *, n: int) -> RolloutBatch:
    """Samples of 1, 2, 3, ... tokens with these scores (None: the reward failed), n of a prompt."""
    prompts = [Prompt(uid, [7], "", None, {}, "") for uid in range(len(scores) // n)]
    batch = make_batch(
        prompts,
        [Completion([5] * (i + 1), [0.0] * (i + 1), "stop") for i in range(len(scores))],
        scores=[0.0 if s is None else s for s in scores],
        failed=[i for i, s in enumerate(scores) if s is None],
        greedy_scores=torch.zeros(len(prompts)),
    )
    batch.values = torch.zeros(batch.response_mask.shape)
    batch.old_logprobs = batch.ref_logprobs = torch.zeros(batch.response_mask.shape)
    batch.rewards = token_rewards(batch.all.scores, None, batch.response_mask, kl_coef=0.0)
    return batch


def advantages(batch: RolloutBatch, name: Any, **keys: Any) -> list[float]:
    """Of the first token of each sample, which its other tokens share."""
    found = estimate(batch, AlgorithmConfig(adv_estimator=name, **keys)).advantages
    assert found.shape == batch.response_mask.shape
    assert (found == torch.where(batch.response_mask, found[:, :1], 0.0)).all()
    return found[:, 0].tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [  # of the scores 1 and 4, by hand
        ("grpo", [-1.5, 1.5]),
        ("rloo", [-3.0, 3.0]),
        ("opo", [1 - (1 * 3 + 4 * 4) / 7, 4 - (1 * 3 + 4 * 4) / 7]),  # of 3 and 4 tokens
    ],
)
def test_a_sample_whose_siblings_all_failed_has_nothing_to_be_compared_with(name, expected):
    batch = make([None, 100.0, 1.0, 4.0, None, None], n=2)
    assert batch.all.alone.tolist() == [False, True, False, False, False, False]
    found = advantages(batch, name, norm_adv_by_std_in_grpo=False)
    assert found == pytest.approx([0, 0, *expected, 0, 0])


def test_what_is_whitened_leaves_a_sample_without_siblings_out():
    batch = make([None, 100.0, 1.0, 4.0], n=2)
    found = advantages(batch, "reinforce_plus_plus_baseline")
    tokens = [-1.5] * 3 + [1.5] * 4
    mean, std = statistics.fmean(tokens), statistics.stdev(tokens)
    assert found == pytest.approx([0, 0, (-1.5 - mean) / std, (1.5 - mean) / std])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [100, 0, 40]),
        ("rloo", [100, 0, 40]),
        ("opo", [100, 0, 40]),
        (
            "reinforce_plus_plus_baseline",
            [1.5, 0, -0.5],
        ),  # 1 token of 100, 3 of 40: mean 55, std 30
    ],
)
def test_with_one_response_a_prompt_the_rule_of_a_group_of_one_holds(name, expected):
    batch = make([100.0, None, 40.0], n=1)
    assert not batch.all.alone.any()
    assert advantages(batch, name) == pytest.approx(expected, rel=1e-5)


def test_opd_follows_the_teacher_at_each_token_and_takes_the_reward_by_its_weight():
    batch = make([None, 100.0, 1.0, 4.0], n=2)
    batch.old_logprobs = torch.full(batch.response_mask.shape, -1.0)
    batch.ref_logprobs = torch.tensor([-0.5, -1.0, -3.0, float("-inf")]).expand(4, 4).clone()
    found = estimate(batch, AlgorithmConfig(adv_estimator="opd")).advantages
    alone = [0.5, 0.0, -2.0, float("-inf")]  # minus (log pi - log pi_ref), no sum over what follows
    assert found.tolist() == [[0.0] * 4, [*alone[:2], 0, 0], [*alone[:3], 0], alone]
    weighted = AlgorithmConfig(adv_estimator="opd", opd_reward_weight=0.1)
    found = estimate(batch, weighted).advantages
    # 1 and 4 have mean 2.5; where the sibling failed the score stands for itself
    assert found[2].tolist() == pytest.approx([0.5 - 0.15, -0.15, -2.15, 0])
    assert found[3].tolist() == pytest.approx([0.5 + 0.15, 0.15, -1.85, float("-inf")])
    assert found[1].tolist() == pytest.approx([10.5, 10.0, 0, 0])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_when_every_sample_has_failed_every_advantage_is_zero(name):
    batch = make([None] * 4, n=2)
    found = estimate(batch, AlgorithmConfig(adv_estimator=name))
    assert not found.advantages.any() and found.advantages.isfinite().all()
    assert (found.returns is not None) == ESTIMATOR_NEEDS[name].critic


@pytest.mark.parametrize("name", ESTIMATORS)
def test_one_failed_sample_of_eight_leaves_the_advantages_of_the_other_seven(name):
    batch = make([1.0, 4.0, None, 2.0, 0.5, 0.0, 3.0, 0.0], n=4)
    g = torch.Generator().manual_seed(2)
    noise = torch.randn(3, *batch.response_mask.shape, generator=g)
    assert batch.rewards is not None
    batch.rewards = torch.where(batch.response_mask, batch.rewards + 0.1 * noise[0], 0.0)
    batch.values = torch.where(batch.response_mask, noise[1], torch.nan)
    for tensor in ("old_logprobs", "ref_logprobs"):
        setattr(batch, tensor, noise[2].abs().neg() * (1 + (tensor == "ref_logprobs")))
    others = [0, 1, 3, 4, 5, 6, 7]
    seven = without(batch, 2)
    mask = seven.response_mask
    found, want = (estimate(x, AlgorithmConfig(adv_estimator=name)) for x in (batch, seven))
    torch.testing.assert_close(found.advantages[others][mask], want.advantages[mask])
    assert want.advantages[mask].abs().sum() > 0 and not found.advantages[2].any()
    if found.returns is not None and want.returns is not None:
        torch.testing.assert_close(found.returns[others][mask], want.returns[mask])
