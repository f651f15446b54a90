"""KL between policy and reference: estimates per token, the in-reward penalty, the controllers.

Owns every formula with a KL in it and how its coefficient moves. Must not know configurations,
models or ranks. Letters: B sequences, T response tokens.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ppo.advantages import at_least_float32


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy, reference) of each token from its two log-probabilities.

    With d = logprobs - ref_logprobs (J. Schulman, "Approximating KL divergence", 2020):
    "kl" = "k1": d. "abs": |d|. "mse" = "k2": d^2 / 2. "low_var_kl" = "k3": e^-d + d - 1, with d
    clamped to +-20 and the value to +-10. A trailing "+" takes the value of that kind and the
    gradient of k2, which is an unbiased gradient of the KL.

    Where a log-probability is NaN or infinite, the gradient is 0.

    Args:
        logprobs: any shape; from the policy that the tokens were sampled from.
        ref_logprobs: same shape.
        kind: one of the names above.

    Raises:
        ValueError: unknown kind.
    """
    difference = at_least_float32(logprobs) - at_least_float32(ref_logprobs)
    # 0 x NaN is NaN: a masked token must not reach the gradient through a product.
    difference = torch.where(difference.isfinite(), difference, difference.detach())
    estimate = ESTIMATES.get(kind.removesuffix("+"))
    if estimate is None:
        known = ", ".join(ESTIMATES)
        raise ValueError(f"KL kind {kind!r}: must be one of {known}, with or without '+'")
    value = estimate(difference)
    if not kind.endswith("+"):
        return value
    gradient = _k2(difference)
    return gradient - gradient.detach() + value.detach()


def _k1(difference: Tensor) -> Tensor:
    return difference


def _k2(difference: Tensor) -> Tensor:
    return 0.5 * difference.square()


def _k3(difference: Tensor) -> Tensor:
    x = (-difference).clamp(-20.0, 20.0)
    return (x.exp() - x - 1.0).clamp(-10.0, 10.0)


ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {
    "kl": _k1,
    "k1": _k1,
    "abs": torch.abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}


def full_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Exact KL(policy, reference) = sum p (log p - log q) over the vocabulary, [..., V] -> [...].

    With the arguments exchanged it is KL(reference, policy). A model's own is computed in blocks
    (`ppo.logprobs.token_logprobs`), so that logits never exist as a whole; this is its definition.

    Args:
        logits: [..., V], divided by the temperature; with a gradient where they have one.
        ref_logits: the same shape.
    """
    p, q = (at_least_float32(x).log_softmax(-1) for x in (logits, ref_logits))
    return (p.exp() * (p - q)).sum(-1)


def token_rewards(
    scores: Tensor,
    kl: Tensor | None,
    mask: Tensor,
    *,
    kl_coef: float,
    turn_rewards: Tensor | None = None,
) -> Tensor:
    """Reward per token: the score at the last counted token, minus kl_coef x KL at every one, and
    what turns were rewarded with.

    arXiv 1909.08593, eq. 2. A sequence without counted tokens gets zeros.

    Args:
        scores: [B]; may hold NaN where a sequence counts no token.
        kl: [B, T] estimates, or None for no penalty.
        mask: bool [B, T].
        kl_coef: beta.
        turn_rewards: [B, T] beside the score, at tokens that count.

    Returns:
        [B, T], 0 where `mask` is False.
    """
    counted_after = mask.flip(-1).cumsum(-1).flip(-1)  # [B, T] counted tokens from t on
    rewards = torch.where(
        mask & (counted_after == 1), at_least_float32(scores)[:, None], 0.0
    )  # [B, T]
    if turn_rewards is not None:
        rewards = rewards + torch.where(mask, turn_rewards, 0.0)
    if kl is not None:
        rewards = rewards - torch.where(mask, kl_coef * kl, 0.0)
    return rewards


class KLControllerSettings(Protocol):
    """What `make_kl_controller` reads; the keys of algorithm.kl_ctrl."""

    @property
    def type(self) -> str: ...  # fixed | adaptive | step
    @property
    def kl_coef(self) -> float: ...
    @property
    def target_kl(self) -> float: ...
    @property
    def horizon(self) -> int: ...
    @property
    def min(self) -> float: ...
    @property
    def max(self) -> float: ...


class KLController:
    """The coefficient of the KL penalty (`value`), and how it follows the measured KL."""

    def __init__(self, kl_coef: float) -> None:
        self.value = self.kl_coef = kl_coef

    def update(self, kl: float, num_seqs: int) -> None:
        """Move the coefficient after a step; this one stays.

        Args:
            kl: token-weighted mean over the global batch; not finite: the coefficient stays.
            num_seqs: sequences of the global batch.
        """

    def state_dict(self) -> dict[str, Any]:
        """The coefficient, and what it began with; JSON-able."""
        return {"value": self.value, "kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict` of an earlier run, unless its kl_coef was another one."""
        if state.get("kl_coef", self.kl_coef) == self.kl_coef:
            self.value = float(state["value"])


class FixedKLController(KLController):
    """A coefficient that never moves: it is what the configuration says."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to go on from."""


class AdaptiveKLController(KLController):
    """Proportional control with a bounded error (arXiv 1909.08593, section 2.2).

    beta *= 1 + clip(KL / target - 1, +-0.2) * num_seqs / horizon, kept inside [min, max].
    """

    def __init__(
        self, kl_coef: float, *, target_kl: float, horizon: int, min: float, max: float
    ) -> None:
        super().__init__(kl_coef)
        self.target_kl, self.horizon, self.min, self.max = target_kl, horizon, min, max

    def update(self, kl: float, num_seqs: int) -> None:
        """Move the coefficient after a step, as KLController.update describes."""
        if math.isfinite(kl):
            error = min(max(kl / self.target_kl - 1.0, -0.2), 0.2)
            value = self.value * (1.0 + error * num_seqs / self.horizon)
            self.value = min(max(value, self.min), self.max)


class StepKLController(KLController):
    """The rule of PPO's adaptive penalty, with steps of 1.5 (arXiv 1707.06347, section 4).

    KL above 1.5 x target: beta x 1.5; below target / 1.5: beta / 1.5; between: unchanged; kept
    inside [min, max].
    """

    def __init__(self, kl_coef: float, *, target_kl: float, min: float, max: float) -> None:
        super().__init__(kl_coef)
        self.target_kl, self.min, self.max = target_kl, min, max

    def update(self, kl: float, num_seqs: int) -> None:
        """Move the coefficient after a step, by `kl` alone, as KLController.update describes."""
        value = self.value
        if math.isfinite(kl) and kl > 1.5 * self.target_kl:
            value *= 1.5
        elif math.isfinite(kl) and kl < self.target_kl / 1.5:
            value /= 1.5
        self.value = min(max(value, self.min), self.max)


def make_kl_controller(settings: KLControllerSettings) -> KLController:
    """The controller that algorithm.kl_ctrl asks for."""
    if settings.type == "fixed":
        return FixedKLController(settings.kl_coef)
    limits = {"target_kl": settings.target_kl, "min": settings.min, "max": settings.max}
    if settings.type == "adaptive":
        return AdaptiveKLController(settings.kl_coef, horizon=settings.horizon, **limits)
    return StepKLController(settings.kl_coef, **limits)
