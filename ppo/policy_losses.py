"""The policy losses that actor.policy_loss.loss_mode chooses from: pure tensor maths.

Owns what a name means and what is logged of it; what all losses share is in ppo/losses.py. Must not
know configurations, models or ranks. K are the tokens of one micro-batch that count.

A loss takes what `PolicyInputs` holds. One that needs more (the sequence of each token and its sum
over the sp group, for a ratio of whole sequences; tokens selected in the mini-batch) gets it as a
field there, filled in ppo/update.py.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from ppo.losses import policy_loss


class PolicyKeys(Protocol):
    """What losses read of the section actor."""

    @property
    def clip_ratio_low(self) -> float: ...
    @property
    def clip_ratio_high(self) -> float: ...
    @property
    def clip_ratio_c(self) -> float: ...


class PolicyInputs(NamedTuple):
    """The tokens of one micro-batch, [K] each."""

    logprobs: Tensor  # with a gradient
    old_logprobs: Tensor
    advantages: Tensor
    keys: PolicyKeys


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


POLICY_LOSSES: dict[str, Callable[[PolicyInputs], PolicyOutputs]] = {
    "vanilla": vanilla,
}
