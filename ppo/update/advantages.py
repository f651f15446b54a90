"""Step 4: rewards of tokens with the KL penalty, and advantages of them.

Owns their order, and what of it is logged. The formulas are in ppo/kl.py, ppo/estimators.py and
ppo/advantages.py.
"""

from torch.distributed import ProcessGroup

from ppo.advantages import masked_mean
from ppo.batch.samples import RolloutBatch
from ppo.config import Config
from ppo.estimators import estimate
from ppo.kl import KLController, kl_estimate, token_rewards
from ppo.metrics import Metrics
from ppo.update.correction import correct_rollout
from ppo.update.running import Running


def add_advantages(
    batch: RolloutBatch,
    config: Config,
    controller: KLController,
    metrics: Metrics,
    ranks: ProcessGroup | None = None,
    kl_factor: float = 1.0,
    running: Running | None = None,
) -> None:
    """KL penalty in the reward, then advantages, of the rows here.

    ranks: that hold all rows once, whose statistics they are; None: this one does. Collective.
    kl_factor: on the controller's coefficient.
    running: what scores and returns are normalised with; None: they are not.
    """
    running = running or Running(config)
    algorithm, overview, mask = config.algorithm, batch.all, batch.response_mask
    kl = None
    if batch.ref_logprobs is not None and batch.old_logprobs is not None and overview.counted.any():
        k3 = kl_estimate(batch.old_logprobs, batch.ref_logprobs, "k3")
        metrics.set("actor/ref_kl", masked_mean(k3, mask, ranks).item())
        if algorithm.charges_kl:
            kl = kl_estimate(batch.old_logprobs, batch.ref_logprobs, algorithm.kl_penalty)
    scores = running.scores_of(batch, metrics)
    kl_coef = controller.value * kl_factor
    batch.rewards = token_rewards(
        scores[batch.rows],
        kl,
        mask,
        kl_coef=kl_coef,
        turn_rewards=running.turn_rewards_of(batch),
    )
    if kl is not None:
        mean = masked_mean(kl, mask, ranks).item()
        metrics.set("actor/reward_kl_penalty", mean)
        metrics.set("actor/kl_coef", kl_coef)
        controller.update(mean, overview.num_samples)
    running.denormalise_values(batch)
    batch.advantages, batch.returns = estimate(batch, algorithm, ranks, scores)
    running.note_returns(batch, metrics, ranks)
    if algorithm.needs.siblings:
        metrics.set("reward/alone", int((overview.alone & overview.is_last).sum()))
    correct_rollout(batch, config, metrics, ranks)
