"""Advantages of a batch, by the estimator that algorithm.adv_estimator names.

Owns what each estimator gets and which samples it gets; the formulas are in ppo/advantages.py, and
what an estimator needs of the run in ppo/config/sections/algorithm.py. Every rank computes the
same, from all samples.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ppo import advantages as formulas
from ppo.batch import RolloutBatch
from ppo.config import AdvEstimator, AlgorithmConfig


class Samples(NamedTuple):
    """The samples that an estimator compares; B counts these alone."""

    rewards: Tensor  # [B, T] per token, KL penalty included
    mask: Tensor  # [B, T] bool
    groups: Tensor  # [B] index of the prompt in the batch
    values: Tensor | None  # [B, T] with a critic
    greedy_scores: Tensor | None  # [B] of the greedy response to the same prompt, where sampled

    @property
    def scores(self) -> Tensor:
        """Rewards summed over the tokens, [B]."""
        return self.rewards.sum(-1)


class Estimate(NamedTuple):
    """What an estimator makes of rewards."""

    advantages: Tensor  # [B, T]
    returns: Tensor | None = None  # [B, T] targets of the critic, where there is one


def estimate(batch: RolloutBatch, algorithm: AlgorithmConfig) -> Estimate:
    """Advantages and returns [B, T] from batch.rewards.

    Samples that failed get 0 and spoil no group. Where siblings are compared, so does a sample
    whose siblings all failed: nothing says whether its score is a good one.
    """
    assert batch.rewards is not None
    used = ~batch.failed
    if algorithm.needs.siblings:
        used &= ~batch.alone
    if not used.any():
        nothing = batch.rewards.new_zeros(batch.rewards.shape)
        return Estimate(nothing, nothing if algorithm.needs.critic else None)
    groups = batch.group_ids[used]
    samples = Samples(
        rewards=batch.rewards[used],
        mask=batch.response_mask[used],
        groups=groups,
        values=None if batch.values is None else batch.values[used],
        greedy_scores=None if batch.greedy is None else batch.greedy.scores[groups],
    )
    found = ESTIMATORS[algorithm.adv_estimator](samples, algorithm)
    returns = None if found.returns is None else _spread(found.returns, used)
    return Estimate(_spread(found.advantages, used), returns)


def _spread(x: Tensor, used: Tensor) -> Tensor:
    """Rows of the used samples at their places in the batch; 0 elsewhere."""
    whole = x.new_zeros(len(used), *x.shape[1:])
    whole[used] = x
    return whole


def _gae(samples: Samples, algorithm: AlgorithmConfig) -> Estimate:
    assert samples.values is not None
    found = formulas.gae(
        samples.rewards, samples.values, samples.mask, gamma=algorithm.gamma, lam=algorithm.lam
    )
    return Estimate(formulas.masked_whiten(found.advantages, samples.mask), found.returns)


def _grpo(samples: Samples, algorithm: AlgorithmConfig) -> Estimate:
    norm_by_std = algorithm.norm_adv_by_std_in_grpo
    found = formulas.grpo(samples.scores, samples.groups, norm_by_std=norm_by_std)
    return _at_every_token(found, samples)


def _rloo(samples: Samples, algorithm: AlgorithmConfig) -> Estimate:
    return _at_every_token(formulas.rloo(samples.scores, samples.groups), samples)


def _opo(samples: Samples, algorithm: AlgorithmConfig) -> Estimate:
    lengths = samples.mask.sum(-1)
    return _at_every_token(formulas.opo(samples.scores, lengths, samples.groups), samples)


def _reinforce_plus_plus(samples: Samples, algorithm: AlgorithmConfig) -> Estimate:
    gamma = algorithm.gamma
    return Estimate(formulas.reinforce_plus_plus(samples.rewards, samples.mask, gamma=gamma))


def _reinforce_plus_plus_baseline(samples: Samples, algorithm: AlgorithmConfig) -> Estimate:
    scores, groups, mask = samples.scores, samples.groups, samples.mask
    return Estimate(formulas.reinforce_plus_plus_baseline(scores, groups, mask))


def _remax(samples: Samples, algorithm: AlgorithmConfig) -> Estimate:
    assert samples.greedy_scores is not None
    return Estimate(formulas.remax(samples.rewards, samples.greedy_scores, samples.mask))


def _at_every_token(per_sequence: Tensor, samples: Samples) -> Estimate:
    """[B] -> [B, T], 0 outside the mask."""
    return Estimate(per_sequence[:, None] * samples.mask)


ESTIMATORS: dict[AdvEstimator, Callable[[Samples, AlgorithmConfig], Estimate]] = {
    "gae": _gae,
    "grpo": _grpo,
    "rloo": _rloo,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "remax": _remax,
    "opo": _opo,
}
