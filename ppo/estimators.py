"""Advantages of a batch, by the estimator that algorithm.adv_estimator names.

Owns what each estimator gets and which samples it gets; the formulas are in ppo/advantages.py, and
what an estimator needs of the run in ppo/config/sections/algorithm.py. What is one number a
sample, every rank knows of all; what is one a token, it has of its own rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ppo import advantages as formulas
from ppo.batch.samples import RolloutBatch
from ppo.config import AdvEstimator, AlgorithmConfig


class Samples(NamedTuple):
    """The samples that an estimator compares: B in all, and the b rows of this rank.

    A sample has one row, an episode one for each of its segments.
    """

    scores: Tensor  # [B] rewards summed over the tokens of all rows, the score once
    groups: Tensor  # [B] index of the prompt in the batch
    lengths: Tensor  # [B] tokens that count
    greedy_scores: Tensor | None  # [B] of the greedy response to the same prompt, where sampled
    here: Tensor  # [b] which of them each row of this rank belongs to
    rewards: Tensor  # [b, T] per token, KL penalty included
    mask: Tensor  # [b, T] bool
    values: Tensor | None  # [b, T] with a critic
    old_logprobs: Tensor | None  # [b, T] where the step has computed them
    ref_logprobs: Tensor | None  # [b, T] with a reference
    ranks: ProcessGroup | None  # that hold all of them together; None: this one does


class Estimate(NamedTuple):
    """What an estimator makes of rewards."""

    advantages: Tensor  # [b, T]
    returns: Tensor | None = None  # [b, T] targets of the critic, where there is one


def estimate(
    batch: RolloutBatch,
    algorithm: AlgorithmConfig,
    ranks: ProcessGroup | None = None,
    charged: Tensor | None = None,
) -> Estimate:
    """Advantages and returns [b, T] from batch.rewards. Collective over `ranks`.

    Samples that failed get 0 and spoil no group. Where siblings are compared, so does a sample
    whose siblings all failed: nothing says whether its score is a good one.

    Args:
        ranks: that hold the batch together, once; None: this rank holds all.
        charged: [B] scores as batch.rewards has them; None: batch.all.scores.
    """
    assert batch.rewards is not None
    overview = batch.all
    used = ~overview.failed
    if algorithm.needs.siblings:
        used &= ~overview.alone
    if not used.any():
        nothing = batch.rewards.new_zeros(batch.rewards.shape)
        return Estimate(nothing, nothing if algorithm.needs.critic else None)
    scores = torch.zeros(len(overview), dtype=torch.float64)
    scores[batch.rows] = batch.rewards.sum(-1).double()  # exact: one rank has each, others zero
    formulas.all_reduced(scores, ranks)
    if overview.samples is not None:
        charged = overview.scores if charged is None else charged
        scores = scores - torch.where(overview.has_score_again, charged, 0.0).double()
    stands = used & overview.is_last  # for its sample
    groups, own = overview.group_ids[stands], used[batch.rows]
    number = (stands.cumsum(0) - stands.long())[used]  # [used rows] of the sample of each
    samples = Samples(
        scores=_sums(scores[used], number).to(batch.rewards.dtype),
        groups=groups,
        lengths=_sums(overview.counted[used], number),
        greedy_scores=None if overview.greedy_scores is None else overview.greedy_scores[groups],
        here=number[(used.cumsum(0) - 1)[batch.rows][own]],
        rewards=batch.rewards[own],
        mask=batch.response_mask[own],
        values=_own(batch.values, own),
        old_logprobs=_own(batch.old_logprobs, own),
        ref_logprobs=_own(batch.ref_logprobs, own),
        ranks=ranks,
    )
    found = ESTIMATORS[algorithm.adv_estimator](samples, algorithm)
    returns = None if found.returns is None else _spread(found.returns, own)
    return Estimate(_spread(found.advantages, own), returns)


def _sums(x: Tensor, number: Tensor) -> Tensor:
    """Of the rows of each sample: [rows] -> [samples]."""
    return x.new_zeros(int(number[-1]) + 1).index_add_(0, number, x)


def _own(x: Tensor | None, used: Tensor) -> Tensor | None:
    return None if x is None else x[used]


def _spread(x: Tensor, used: Tensor) -> Tensor:
    """Rows of the used samples at their places among the rows of this rank; 0 elsewhere."""
    whole = x.new_zeros(len(used), *x.shape[1:])
    whole[used] = x
    return whole


def _gae(samples: Samples, algorithm: AlgorithmConfig) -> Estimate:
    assert samples.values is not None
    found = formulas.gae(
        samples.rewards, samples.values, samples.mask, gamma=algorithm.gamma, lam=algorithm.lam
    )
    whitened = formulas.masked_whiten(found.advantages, samples.mask, samples.ranks)
    return Estimate(whitened, found.returns)


def _grpo(samples: Samples, algorithm: AlgorithmConfig) -> Estimate:
    norm_by_std = algorithm.norm_adv_by_std_in_grpo
    found = formulas.grpo(samples.scores, samples.groups, norm_by_std=norm_by_std)
    return _at_every_token(found, samples)


def _rloo(samples: Samples, algorithm: AlgorithmConfig) -> Estimate:
    return _at_every_token(formulas.rloo(samples.scores, samples.groups), samples)


def _opo(samples: Samples, algorithm: AlgorithmConfig) -> Estimate:
    found = formulas.opo(samples.scores, samples.lengths, samples.groups)
    return _at_every_token(found, samples)


def _reinforce_plus_plus(samples: Samples, algorithm: AlgorithmConfig) -> Estimate:
    return Estimate(
        formulas.reinforce_plus_plus(
            samples.rewards, samples.mask, gamma=algorithm.gamma, group=samples.ranks
        )
    )


def _reinforce_plus_plus_baseline(samples: Samples, algorithm: AlgorithmConfig) -> Estimate:
    centred = formulas.grpo(samples.scores, samples.groups, norm_by_std=False)
    whole = _at_every_token(centred, samples).advantages
    return Estimate(formulas.masked_whiten(whole, samples.mask, samples.ranks))


def _remax(samples: Samples, algorithm: AlgorithmConfig) -> Estimate:
    assert samples.greedy_scores is not None
    greedy = samples.greedy_scores[samples.here]
    return Estimate(formulas.remax(samples.rewards, greedy, samples.mask))


def _opd(samples: Samples, algorithm: AlgorithmConfig) -> Estimate:
    assert samples.old_logprobs is not None and samples.ref_logprobs is not None
    found = formulas.opd(samples.old_logprobs, samples.ref_logprobs, samples.mask)
    if algorithm.opd_reward_weight != 0:
        centred = formulas.grpo(samples.scores, samples.groups, norm_by_std=False)
        reward = _at_every_token(centred, samples).advantages
        found = found + algorithm.opd_reward_weight * reward
    return Estimate(found)


def _at_every_token(per_sequence: Tensor, samples: Samples) -> Estimate:
    """[B] -> [b, T], 0 outside the mask."""
    return Estimate(per_sequence[samples.here][:, None] * samples.mask)


ESTIMATORS: dict[AdvEstimator, Callable[[Samples, AlgorithmConfig], Estimate]] = {
    "gae": _gae,
    "grpo": _grpo,
    "rloo": _rloo,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "remax": _remax,
    "opo": _opo,
    "opd": _opd,
}
