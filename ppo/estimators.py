"""Advantages without a critic, by the estimator that algorithm.adv_estimator names.

Owns the choice and what each estimator gets; the formulas are in ppo/advantages.py. Every rank
computes the same, from all samples.
"""

import torch
from torch import Tensor

from ppo.advantages import grpo, opo, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, rloo
from ppo.batch import RolloutBatch
from ppo.config import AlgorithmConfig


def advantages_without_critic(batch: RolloutBatch, algorithm: AlgorithmConfig) -> Tensor:
    """Advantages [B, T] from batch.rewards; failed samples get 0 and spoil no group."""
    assert batch.rewards is not None
    scored = ~batch.failed
    rewards, mask = batch.rewards[scored], batch.response_mask[scored]
    scores, groups = rewards.sum(-1), batch.group_ids[scored]
    match algorithm.adv_estimator:
        case "grpo":
            norm_by_std = algorithm.norm_adv_by_std_in_grpo
            found = grpo(scores, groups, norm_by_std=norm_by_std)[:, None] * mask
        case "rloo":
            found = rloo(scores, groups)[:, None] * mask
        case "opo":
            found = opo(scores, mask.sum(-1), groups)[:, None] * mask
        case "reinforce_plus_plus":
            found = reinforce_plus_plus(rewards, mask, gamma=algorithm.gamma)
        case "reinforce_plus_plus_baseline":
            found = reinforce_plus_plus_baseline(scores, groups, mask)
        case "remax":
            assert batch.greedy is not None
            found = remax(rewards, batch.greedy.scores[groups], mask)
        case other:
            raise AssertionError(other)
    advantages = torch.zeros_like(batch.rewards)
    advantages[scored] = found
    return advantages
