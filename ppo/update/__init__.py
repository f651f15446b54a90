"""Advantages, the two updates of an iteration, and what the actor's leaves out or weighs."""

from ppo.update.advantages import add_advantages
from ppo.update.correction import correct_rollout, needs_old_logprobs
from ppo.update.running import Running
from ppo.update.steps import Part, epoch_mini_batches, update_actor, update_critic

__all__ = [
    "Part",
    "Running",
    "add_advantages",
    "correct_rollout",
    "epoch_mini_batches",
    "needs_old_logprobs",
    "update_actor",
    "update_critic",
]
