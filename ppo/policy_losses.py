"""The policy losses that actor.policy_loss.loss_mode chooses from: pure tensor maths.

Owns what a name means and what is logged of it; what all losses share is in ppo/losses.py. Must not
know configurations, models or ranks. K are the tokens of one micro-batch that count.

A loss gives one number a token; actor.loss_agg_mode makes one number of them. Losses of whole
sequences are written so that with seq-mean-token-mean they are what their papers define: the value
of a sequence at each of its tokens, and the gradient shared out among them. Where an input is not
finite the gradient is 0, and where |log ratio| exceeds 20 it is cut there.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ppo.advantages import at_least_float32
from ppo.losses import policy_loss

LARGEST_LOG_RATIO = 20.0
LARGEST_LOG_SEQUENCE_RATIO = 10.0


class PolicyKeys(Protocol):
    """What losses read of the section actor."""

    @property
    def clip_ratio_low(self) -> float: ...
    @property
    def clip_ratio_high(self) -> float: ...
    @property
    def clip_ratio_c(self) -> float: ...
    @property
    def policy_loss(self) -> "ModeKeys": ...
    @property
    def tau_pos(self) -> float: ...
    @property
    def tau_neg(self) -> float: ...


class ModeKeys(Protocol):
    """What losses read of the section actor.policy_loss."""

    @property
    def ppo_kl_coef(self) -> float: ...


def _no_sequences(values: Tensor) -> Tensor:
    raise AssertionError("a loss of whole sequences needs them")


class PolicyInputs(NamedTuple):
    """The tokens of one micro-batch, [K] each."""

    logprobs: Tensor  # with a gradient
    old_logprobs: Tensor
    advantages: Tensor
    keys: PolicyKeys
    sum_of_sequence: Callable[[Tensor], Tensor] = _no_sequences
    """[K] -> [K]: of all counted tokens of each token's sequence, on whatever ranks; no gradient"""
    selected: Tensor | None = None  # bool, of SELECTING losses: tokens with a large covariance

    def difference(self) -> Tensor:
        """log pi - log pi_old of each token, without gradient where an input is not finite."""
        difference = at_least_float32(self.logprobs) - at_least_float32(self.old_logprobs).detach()
        # 0 x NaN is NaN: the weight 0 of a masked token must not meet a NaN factor in the backward
        finite = self.advantages.isfinite() & difference.isfinite()
        return torch.where(finite, difference, difference.detach())

    def mean_of_sequence(self, values: Tensor) -> Tensor:
        """[K] -> [K]: mean over the counted tokens of each token's sequence; no gradient."""
        values = values.detach()
        return self.sum_of_sequence(values) / self.sum_of_sequence(torch.ones_like(values))

    def signed(self) -> Tensor:
        """Advantages in float32 at least."""
        return at_least_float32(self.advantages).detach()


class PolicyOutputs(NamedTuple):
    """Per-token results, [K] each."""

    loss: Tensor
    metrics: dict[str, Tensor]  # logged as actor/NAME: the mean over all tokens of the update


def vanilla(inputs: PolicyInputs) -> PolicyOutputs:
    """PPO's clipped surrogate with dual clip, of `ppo.losses.policy_loss`."""
    found = policy_loss(
        inputs.logprobs,
        inputs.old_logprobs,
        inputs.advantages,
        clip_low=inputs.keys.clip_ratio_low,
        clip_high=inputs.keys.clip_ratio_high,
        clip_c=inputs.keys.clip_ratio_c,
    )
    return PolicyOutputs(
        found.loss, {"pg_clipfrac": found.clipped, "pg_clipfrac_lower": found.clipped_low}
    )


def gspo(inputs: PolicyInputs) -> PolicyOutputs:
    """Clipped ratios of whole sequences (GSPO, arXiv 2507.18071, eq. 5 to 7 and 14).

    s = exp(mean_t d_t), d the log ratio of a token; -min(A s, A clip(s, 1 - low, 1 + high)) at each
    token, through which the gradient of s flows for that token alone.
    """
    difference, advantages = inputs.difference(), inputs.signed()
    mean = inputs.mean_of_sequence(difference)
    log_ratio = difference - difference.detach() + mean
    ratio = log_ratio.clamp(max=LARGEST_LOG_SEQUENCE_RATIO).exp()
    return _clipped(ratio, advantages, inputs.keys)


def cispo(inputs: PolicyInputs) -> PolicyOutputs:
    """REINFORCE with clipped importance weights (CISPO, arXiv 2506.13585, eq. 4 and 5).

    -sg(clip(r, 1 - low, 1 + high)) A log pi: no token loses its gradient.
    """
    difference, keys = inputs.difference(), inputs.keys
    ratio = _ratio(difference).detach()
    weight = ratio.clamp(1.0 - keys.clip_ratio_low, 1.0 + keys.clip_ratio_high)
    loss = -weight * inputs.signed() * _logprobs(inputs, difference)
    return PolicyOutputs(loss, {"pg_clipfrac": weight != ratio})


def sapo(inputs: PolicyInputs) -> PolicyOutputs:
    """A smooth gate in place of the clip (SAPO, arXiv 2511.20347, eq. 5 and 6).

    -A (4 / tau) sigmoid(tau (r - 1)), with tau_pos where A > 0 and tau_neg elsewhere.
    """
    advantages, keys = inputs.signed(), inputs.keys
    ratio = _ratio(inputs.difference())
    tau = torch.where(advantages > 0, keys.tau_pos, keys.tau_neg)
    return PolicyOutputs(-advantages * (tau * (ratio - 1.0)).sigmoid() * 4.0 / tau, {})


def gpg(inputs: PolicyInputs) -> PolicyOutputs:
    """The plain policy gradient, -A log pi (GPG, arXiv 2504.02546, eq. 6)."""
    return PolicyOutputs(-inputs.signed() * _logprobs(inputs, inputs.difference()), {})


def geo_mean(inputs: PolicyInputs) -> PolicyOutputs:
    """The geometric mean of clipped ratios (GMPO, arXiv 2507.20673, eq. 4).

    Log ratios are clipped to [-low, high] on the side that the sign of A makes pessimistic; then
    -A exp(mean_t d_t) for a sequence.
    """
    difference, advantages, keys = inputs.difference(), inputs.signed(), inputs.keys
    limited = difference.clamp(-keys.clip_ratio_low, keys.clip_ratio_high)
    sign = advantages.sign()
    kept = torch.minimum(sign * difference, sign * limited) * sign
    mean = inputs.mean_of_sequence(kept).clamp(max=LARGEST_LOG_SEQUENCE_RATIO)
    # the value of the sequence at each token, and for each token's d its part of the gradient
    ratio = mean.exp() * (1.0 + kept - kept.detach())
    return PolicyOutputs(-advantages * ratio, {"pg_clipfrac": kept.detach() != difference.detach()})


def dppo_tv(inputs: PolicyInputs) -> PolicyOutputs:
    """Tokens whose probability has moved too far are left out (DPPO-Binary-TV, arXiv 2602.04879).

    -A sg(min(r, clip_ratio_c)) log pi where p - p_old <= high for A > 0, and >= -low elsewhere.
    """
    moved = inputs.logprobs.detach().exp() - inputs.old_logprobs.exp()
    keys = inputs.keys
    near = torch.where(
        inputs.advantages > 0, moved <= keys.clip_ratio_high, moved >= -keys.clip_ratio_low
    )
    return _truncated(inputs, near)


def dppo_kl(inputs: PolicyInputs) -> PolicyOutputs:
    """The same by the divergence of the token against all others (DPPO-Binary-KL).

    KL(Bernoulli(p_old), Bernoulli(p)) may be at most high for A > 0, low elsewhere, unless the
    token has moved the other way.
    """
    new, old = at_least_float32(inputs.logprobs).detach(), at_least_float32(inputs.old_logprobs)
    p, q = new.exp(), old.exp()
    tiny = 1e-8
    divergence = q * (old - new) + (1.0 - q) * ((1.0 - q + tiny) / (1.0 - p + tiny)).log()
    keys = inputs.keys
    near = torch.where(
        inputs.advantages > 0,
        (divergence <= keys.clip_ratio_high) | (p <= q),
        (divergence <= keys.clip_ratio_low) | (p >= q),
    )
    return _truncated(inputs, near)


def clip_cov(inputs: PolicyInputs) -> PolicyOutputs:
    """PPO's clip; selected tokens have no gradient (Clip-Cov, arXiv 2505.22617, section 4.2)."""
    assert inputs.selected is not None
    found = _clipped(_ratio(inputs.difference()), inputs.signed(), inputs.keys)
    loss = torch.where(inputs.selected, 0.0, found.loss)
    return PolicyOutputs(loss, {**found.metrics, "pg_covfrac": inputs.selected})


def kl_cov(inputs: PolicyInputs) -> PolicyOutputs:
    """-A r, and for selected tokens ppo_kl_coef |log r| more (KL-Cov, in the same section)."""
    assert inputs.selected is not None
    difference = inputs.difference()
    penalty = inputs.keys.policy_loss.ppo_kl_coef * difference.abs()
    loss = -inputs.signed() * _ratio(difference)
    loss = loss + torch.where(inputs.selected, penalty, 0.0)
    return PolicyOutputs(loss, {"pg_covfrac": inputs.selected})


def _ratio(difference: Tensor) -> Tensor:
    return difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _logprobs(inputs: PolicyInputs, difference: Tensor) -> Tensor:
    """log pi, with the gradient of the difference: 0 where an input is not finite."""
    return inputs.logprobs.detach() + difference - difference.detach()


def _clipped(ratio: Tensor, advantages: Tensor, keys: PolicyKeys) -> PolicyOutputs:
    free = -advantages * ratio
    held = -advantages * ratio.clamp(1.0 - keys.clip_ratio_low, 1.0 + keys.clip_ratio_high)
    return PolicyOutputs(torch.maximum(free, held), {"pg_clipfrac": held > free})


def _truncated(inputs: PolicyInputs, near: Tensor) -> PolicyOutputs:
    """-A sg(min(r, clip_ratio_c)) log pi of the tokens that are `near`, 0 of the others."""
    difference = inputs.difference()
    weight = _ratio(difference).detach().clamp(max=inputs.keys.clip_ratio_c)
    loss = -inputs.signed() * weight * _logprobs(inputs, difference)
    return PolicyOutputs(torch.where(near, loss, 0.0), {"pg_clipfrac": ~near})


POLICY_LOSSES: dict[str, Callable[[PolicyInputs], PolicyOutputs]] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gpg": gpg,
    "geo_mean": geo_mean,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
SELECTING = ("clip_cov", "kl_cov")
"""losses that treat some tokens of a mini-batch apart; ppo/selection.py says which"""
