"""The two updates of an iteration, and what the actor's leaves out or weighs."""

from ppo.update.steps import (
    Part,
    add_loss_weights,
    epoch_mini_batches,
    needs_old_logprobs,
    update_actor,
    update_critic,
)

__all__ = [
    "Part",
    "add_loss_weights",
    "epoch_mini_batches",
    "needs_old_logprobs",
    "update_actor",
    "update_critic",
]
