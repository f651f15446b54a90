"""The rollout correction of a batch: which weights and rejections, from which log-probs.

Owns when it is computed and what is logged of it; the formulas are in ppo/selection.py. With old
log-probs it is done before the updates, and what is rejected leaves the mask. Without
(bypass_old_logprob) the update does it micro-batch by micro-batch, by its own log-probs: the sums
of a mini-batch are divided by before it is known what is left out.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ppo.advantages import all_reduced, masked_mean
from ppo.batch.samples import RolloutBatch
from ppo.config import Config, RolloutCorrectionConfig
from ppo.metrics import Metrics
from ppo.policy_losses import SELECTING
from ppo.selection import Correction, effective_sample_size, rollout_correction


def needs_old_logprobs(config: Config, num_mini_batches: int) -> bool:
    """False when the update's own detached log-probs can stand in for the old ones."""
    correction = config.algorithm.correction
    return (
        num_mini_batches * config.actor.ppo_epochs > 1
        or config.algorithm.charges_kl
        or config.algorithm.needs.teacher
        or correction.weighs
        or correction.rejects
        or config.actor.policy_loss.loss_mode in SELECTING
        or _is_left_out_by_kl(config)
    )


def _is_left_out_by_kl(config: Config) -> bool:
    """Whether a guard decides before the updates by a KL that they would compute themselves."""
    rules = config.watched_rules() if config.ref_enabled else []
    return any(rule.is_of_batch and rule.metric == "actor/ref_kl" for rule in rules)


def correct_rollout(
    batch: RolloutBatch, config: Config, metrics: Metrics, ranks: ProcessGroup | None = None
) -> None:
    """Weights, and the tokens that both updates leave out, where a correction is asked for.

    After the advantages, which are those of all samples: a token that is rejected costs its own
    part of the losses and nothing else.

    ranks: that hold all rows once; None: this one does. Collective.
    """
    keys, mask = config.algorithm.correction, batch.response_mask
    if batch.bypasses_old or not (keys.weighs or keys.rejects):
        return
    assert batch.old_logprobs is not None
    row = mask.nonzero()[:, 0]  # [K]

    def sum_of_sequence(values: Tensor) -> Tensor:
        return values.new_zeros(len(mask)).index_add_(0, row, values)[row]

    difference = batch.old_logprobs[mask].double() - batch.rollout_logprobs[mask]
    found = _correct(difference, keys, sum_of_sequence, metrics)
    if batch.all.counted.any():
        everything = torch.ones_like(found.ratios, dtype=torch.bool)
        mean = masked_mean(found.ratios, everything, ranks)
        metrics.set("rollout_corr/is_mean", mean.item())  # known before the updates
        share = effective_sample_size(found.ratios, ranks)
        metrics.set("rollout_corr/eff_sample_size", share.item())
    if keys.weighs:
        batch.loss_weights = torch.zeros(mask.shape)
        batch.loss_weights[mask] = found.weights
    if keys.rejects:
        batch.response_mask = mask.clone()
        batch.response_mask[mask] = found.kept
        rejected = torch.zeros(len(batch.all), dtype=torch.float64)  # one rank has each, others 0
        rejected[batch.rows] = (mask & ~batch.response_mask).sum(-1).double()
        batch.all = replace(batch.all, rejected=all_reduced(rejected, ranks).long())


def correct_in_update(
    log_ratios: Tensor,
    keys: RolloutCorrectionConfig,
    sum_of_sequence: Callable[[Tensor], Tensor],
    metrics: Metrics,
) -> Tensor | float:
    """What the losses of a micro-batch's tokens are multiplied with, [K].

    Args:
        log_ratios: [K], of the policy that is updated over the engine's.
        sum_of_sequence: see `rollout_correction`.
    """
    if not (keys.weighs or keys.rejects):
        return 1.0
    found = _correct(log_ratios, keys, sum_of_sequence, metrics)
    metrics.add("rollout_corr/is_mean", found.ratios.sum(), found.ratios.numel())
    return found.weights


def _correct(
    log_ratios: Tensor,
    keys: RolloutCorrectionConfig,
    sum_of_sequence: Callable[[Tensor], Tensor],
    metrics: Metrics,
) -> Correction:
    assert keys.rollout_is_threshold is not None
    found = rollout_correction(
        log_ratios,
        sum_of_sequence,
        level=keys.rollout_is,
        threshold=keys.rollout_is_threshold,
        icepop=keys.icepop,
        reject=keys.rejections,
        veto=keys.rollout_token_veto_threshold,
    )
    count = found.ratios.numel()
    if count:
        # of the weights before they are truncated: truncated ones never tell that engine and
        # trainer have drifted apart
        metrics.maximum("rollout_corr/is_max", found.ratios.max())
    if keys.rejects:
        rejected = (~found.kept).double()
        metrics.add("rollout_corr/rs_masked_fraction", rejected.sum(), count)
        of_sequence = 1.0 / sum_of_sequence(torch.ones_like(rejected))  # its tokens add up to 1
        touched = (sum_of_sequence(rejected) > 0) * of_sequence
        metrics.add("rollout_corr/rs_seq_masked_fraction", touched.sum(), of_sequence.sum())
        vetoed = found.vetoed * of_sequence
        metrics.add("rollout_corr/veto_fraction", vetoed.sum(), of_sequence.sum())
    return found
