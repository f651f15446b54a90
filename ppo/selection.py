"""Which tokens the policy loss leaves out, weighs or treats apart: pure tensor maths.

Owns the correction for what engine and trainer disagree about, and the tokens that Clip-Cov and
KL-Cov choose. Must not know configurations, models or ranks, except through a `group` argument.
Letters: b sequences of this rank, T response tokens, K tokens of some sequences that count.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ppo.advantages import all_reduced

LARGEST_LOG_RATIO = 20.0


class Correction(NamedTuple):
    """What a rollout correction makes of K tokens; none has a gradient."""

    weights: Tensor  # [K] float32, what the loss is multiplied with: 0 for what is dropped
    kept: Tensor  # [K] bool: False = the token is rejected
    vetoed: Tensor  # [K] bool: the token's sequence is rejected by the veto
    ratios: Tensor  # [K] float64, the importance weights before anything is truncated


def rollout_correction(
    log_ratios: Tensor,
    sum_of_sequence: Callable[[Tensor], Tensor],
    *,
    level: Literal["token", "sequence"] | None,
    threshold: float,
    icepop: Sequence[float] | None = None,
    reject: Mapping[str, tuple[float, float]] | None = None,
    veto: float | None = None,
) -> Correction:
    """Importance weights and rejections against the mismatch of engine and trainer.

    With d = log pi_trainer - log pi_engine of a token: w = exp(d), or exp(sum d) of its sequence,
    with the exponent clamped to +-20. Truncated importance sampling (F. Yao et al., "Your efficient
    RL framework secretly brings you off-policy RL training", 2025) takes min(w, threshold); IcePop
    (Ling team, "Small leak can sink a great ship", 2025) gives tokens whose own w lies outside
    [lo, hi] the weight 0. Rejection and veto (J. Liu, Y. Li et al., "When speed kills stability",
    2025) take tokens out of the mask. A token whose d is NaN passes no rule.

    Args:
        log_ratios: [K] d.
        sum_of_sequence: [K] -> [K], the sum over the tokens of each token's sequence.
        level: one weight per token or per sequence; None: 1.
        threshold: largest weight.
        icepop: (lo, hi); None: no token is dropped.
        reject: (low, high) by rule, SCOPE_KIND. Kinds: k1 = d, whose bounds are of exp(d); k2 =
            d^2 / 2; k3 = exp(d) - 1 - d. Scopes: token; seq_sum, seq_mean and seq_max over a
            sequence. exp of seq_mean_k1 is the geometric mean of the ratios.
        veto: a sequence with a token whose exp(d), not clamped, is below is rejected; None: none.
    """
    d = log_ratios.detach().double()
    whole = sum_of_sequence(d) if level == "sequence" else d
    ratios = _exp(whole)
    weights = torch.ones_like(d) if level is None else ratios.clamp(max=threshold)
    if icepop is not None:
        own = _exp(d)
        weights = torch.where((own >= icepop[0]) & (own <= icepop[1]), weights, 0.0)
    kept = torch.ones_like(d, dtype=torch.bool)
    for rule, bounds in (reject or {}).items():
        kept &= _passes(rule, bounds, d, sum_of_sequence)
    vetoed = torch.zeros_like(kept)
    if veto is not None:
        vetoed = sum_of_sequence((~(d >= math.log(veto))).double()) > 0
    kept &= ~vetoed
    return Correction(torch.where(kept, weights, 0.0).float(), kept, vetoed, ratios)


def _exp(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _passes(
    rule: str,
    bounds: tuple[float, float],
    d: Tensor,
    sum_of_sequence: Callable[[Tensor], Tensor],
) -> Tensor:
    """[K] bool: the token, or its sequence, lies within the bounds of a rule of rejection."""
    scope, _, kind = rule.rpartition("_")
    low, high = bounds
    if kind == "k1":
        values, low, high = d, math.log(low), math.log(high)
    elif kind == "k2":
        values = 0.5 * d.square()
    else:
        values = _exp(d) - 1.0 - d.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    if scope == "seq_max":
        return sum_of_sequence((~(values <= high)).double()) == 0
    if scope != "token":
        values = sum_of_sequence(values)
    if scope == "seq_mean":
        values = values / sum_of_sequence(torch.ones_like(d))
    return (values >= low) & (values <= high)


def effective_sample_size(weights: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Share of the tokens that their weights amount to, (sum w)^2 / (n sum w^2), 0 to 1.

    Args:
        weights: [K], of all tokens that count.
        group: ranks that hold a part of them each; every one calls. None: all are here.
    """
    weights = weights.double()
    count = torch.full_like(weights.sum(), weights.numel())
    total, squares, count = all_reduced(
        torch.stack([weights.sum(), weights.square().sum(), count]), group
    )
    return total.square() / (squares * count).clamp(min=torch.finfo(torch.float64).tiny)


def covariances(
    advantages: Tensor, logprobs: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """(A - mean A) (log pi - mean log pi) of each token (arXiv 2505.22617, eq. 9), float64 [b, T].

    Args:
        advantages, logprobs: [b, T].
        mask: bool [b, T], the tokens of the mini-batch that count; 0 elsewhere.
        group: ranks that hold a part of the mini-batch each; every one calls. None: all is here.
    """
    a, x = (torch.where(mask, values.double(), 0.0) for values in (advantages, logprobs))
    sums = all_reduced(torch.stack([a.sum(), x.sum(), mask.sum().double()]), group)
    mean_a, mean_x = sums[:2] / sums[2].clamp(min=1)
    return torch.where(mask, (a - mean_a) * (x - mean_x), 0.0)


def largest(
    values: Tensor, candidates: Tensor, count: int, group: dist.ProcessGroup | None = None
) -> Tensor:
    """bool [b, T]: the `count` candidates of all ranks with the largest values; equal ones alike.

    Args:
        values: float64 [b, T].
        candidates: bool [b, T].
        count: the same on every rank.
        group: as for `covariances`.
    """
    best = values.new_full((count,), -torch.inf)
    own = values[candidates].topk(min(count, int(candidates.sum()))).values
    best[: len(own)] = own
    if group is not None:
        parts = [torch.empty_like(best) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, best, group=group)
        best = torch.cat(parts).topk(count).values
    return candidates & (values >= best[-1])


def noise(key: Sequence[int], numbers: Sequence[int], length: int) -> Tensor:
    """Uniform float64 [b, length] for a random choice that does not depend on who makes it.

    Args:
        key: seed, step, epoch.
        numbers: of the samples.
    """
    rows = [np.random.default_rng([*key, number]).random(length) for number in numbers]
    return torch.from_numpy(np.array(rows).reshape(len(rows), length))
