"""The two updates: mini-batches, micro-batches, losses, one optimizer step per mini-batch.

Divide once: token weights come from the mini-batch's global mask, so that gradients do not depend
on micro-batching, packing, the number of ranks or sp. Every rank runs the same number of forward
and backward passes in the same order.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ppo.batch.overview import Overview
from ppo.batch.packing import Batcher, MicroBatch
from ppo.batch.samples import RolloutBatch, mini_batches
from ppo.batch.shares import move, owners_of
from ppo.batch.states import take_states
from ppo.config import ActorConfig, Config, CriticConfig
from ppo.guards.guard import Guard
from ppo.kl import kl_estimate
from ppo.losses import rollout_probs_diff, token_weights, value_loss
from ppo.metrics import Metrics
from ppo.models.learner import Head, Learner, Model
from ppo.policy_losses import POLICY_LOSSES, SELECTING, PolicyInputs
from ppo.selection import covariances, largest, noise
from ppo.update.correction import correct_in_update


class Part(NamedTuple):
    """One micro-batch of a mini-batch on this rank."""

    micro: MicroBatch
    weights: Tensor  # [K] of each token in the mini-batch's loss, times D
    world_size: int  # D, the ranks that FSDP averages gradients over
    share: float  # this part of 1 over all ranks and micro-batches of the mini-batch
    is_first: bool  # of the first mini-batch: the weights are still those that sampled

    def log_loss(self, metrics: Metrics, name: str, loss: Tensor) -> None:
        """Add a mini-batch loss, so that its mean over mini-batches is reported."""
        metrics.add(name, loss.detach() / self.world_size, self.share)


def epoch_mini_batches(
    overview: Overview,
    section: ActorConfig | CriticConfig,
    *,
    seed: int,
    step: int,
    epoch: int = 0,
) -> list[list[int]]:
    """Samples of each mini-batch of one PPO epoch; order fixed, or shuffled by the seed."""
    shuffle_seed = seed + 1_000_003 * step + epoch if section.shuffle else None
    parts = mini_batches(
        overview.group_ids, num_prompts=section.ppo_mini_batch_size, seed=shuffle_seed
    )
    return [part.tolist() for part in parts]


class _Update(NamedTuple):
    """The update of one model in one iteration."""

    learner: Learner
    batch: RolloutBatch
    section: ActorConfig | CriticConfig
    config: Config
    batcher: Batcher
    metrics: Metrics
    guard: Guard
    ref: Head | None = None  # for the KL over the whole vocabulary

    def run(
        self,
        step: int,
        objective: "Callable[[_Update, nn.Module, Part], Tensor]",
        prepare: Callable[[Sequence[int], int], None] = lambda samples, epoch: None,
    ) -> None:
        """All epochs and mini-batches: backward of the objectives, then one optimizer step, unless
        a guard leaves it out.

        A mini-batch without a token that counts is left out, on every rank: momentum and weight
        decay would move the weights all the same.

        prepare: called before each mini-batch with its samples and the epoch. Collective.
        """
        learner, metrics, guard = self.learner, self.metrics, self.guard
        overview, batcher, name = self.batch.all, self.batcher, learner.name
        lr = learner.set_lr(guard.schedule_step(step), partial(guard.adjusted_lr, name))
        metrics.set(f"{name}/lr", lr)
        seed, is_first = self.config.trainer.seed, True
        with learner.updating() as module:
            for epoch in range(self.section.ppo_epochs):
                parts = epoch_mini_batches(
                    overview, self.section, seed=seed, step=step, epoch=epoch
                )
                move(self.batch, owners_of(overview, parts, batcher.budget), batcher.mesh)
                plans = batcher.plan(self.batch, parts)
                for number, samples in enumerate(parts):
                    counted = overview.counted[samples]
                    if not counted.any():
                        continue
                    prepare(samples, epoch)
                    metrics.watch(guard.watched(name))
                    for part in self.parts(plans[number], counted, is_first=is_first):
                        objective(self, module, part).backward()
                    is_first = False
                    norm = learner.clip_gradients()
                    verdict = guard.judge(name, norm, metrics.lap(), metrics.peak_share())
                    metrics.add(f"{name}/grad_norm", verdict.norm, 1)
                    if verdict.skip:
                        learner.drop_gradients()
                    else:
                        learner.step()
                    if verdict.stop:
                        return
                    if verdict.halve and batcher.halve(self.config.data.max_length):
                        guard.halved(name)
                        plans = batcher.plan(self.batch, parts)

    def parts(
        self, plan: Sequence[Sequence[int]], counted: Tensor, *, is_first: bool = False
    ) -> Iterator[Part]:
        """This rank's micro-batches of one mini-batch, weighted by all that counts in it.

        Args:
            plan: rows of each.
            counted: tokens that count, of each sample of the mini-batch on all ranks.
        """
        batch, batcher = self.batch, self.batcher
        world_size = batcher.mesh.dims.world_size
        for number, rows in enumerate(plan, start=1):
            micro = batcher.make(batch, rows)
            weights = token_weights(
                batch.response_mask[micro.sequences],
                mode=self.section.loss_agg_mode,
                num_tokens=int(counted.sum()),
                num_seqs=int((counted > 0).sum()),
                dp_size=world_size,
                scale=self.config.data.max_response_length,
            )[micro.numbers, micro.cols]
            total = micro.num_tokens + micro.num_padding
            self.metrics.add("perf/padding_waste", micro.num_padding, total)
            if batcher.mesh.dims.dp_replicate > 1:  # replicas are summed with the last one only
                self.learner.module.set_requires_all_reduce(number == len(plan))  # pyright: ignore
            share = 1.0 / (len(plan) * world_size)
            yield Part(micro, micro.put(weights), world_size, share, is_first)


def update_actor(
    actor: Learner,
    batch: RolloutBatch,
    config: Config,
    batcher: Batcher,
    metrics: Metrics,
    step: int,
    guard: Guard,
    ref: Model | None = None,
) -> None:
    """PPO's policy update (arXiv 1707.06347, algorithm 1) over all epochs and mini-batches.

    ref: whose head actor.full_kl takes; batch.ref_hidden holds its hidden states.
    """
    head = None
    if config.actor.full_kl:
        assert ref is not None
        head = ref.whole_head()
    update = _Update(actor, batch, config.actor, config, batcher, metrics, guard, head)
    if config.actor.policy_loss.loss_mode in SELECTING:
        ranks = batcher.mesh.dp_group
        update.run(step, _policy_objective, partial(_select, batch, config, ranks, step))
        batch.selected = None
    else:
        update.run(step, _policy_objective)


def update_critic(
    critic: Learner,
    batch: RolloutBatch,
    config: Config,
    batcher: Batcher,
    metrics: Metrics,
    step: int,
    guard: Guard,
) -> None:
    """Clipped value regression to the returns, over all epochs and mini-batches."""
    update = _Update(critic, batch, config.critic, config, batcher, metrics, guard)
    update.run(step, _value_objective)


def _select(
    batch: RolloutBatch,
    config: Config,
    ranks: ProcessGroup,
    step: int,
    samples: Sequence[int],
    epoch: int,
) -> None:
    """Tokens of a mini-batch that the loss treats apart, the same whatever rank has them.

    By the old log-probs: choosing by those of the update would take a forward pass of its own.
    """
    assert batch.advantages is not None and batch.old_logprobs is not None
    keys = config.actor.policy_loss
    mask = batch.response_mask & torch.isin(batch.rows, torch.tensor(samples))[:, None]
    found = covariances(batch.advantages, batch.old_logprobs, mask, ranks)
    number = int(batch.all.counted[samples].sum())
    if keys.loss_mode == "kl_cov":
        count = max(1, int(keys.kl_cov_ratio * number))
        batch.selected = largest(found, mask, count, ranks)
        return
    candidates = mask & (found > keys.clip_cov_lb) & (found < keys.clip_cov_ub)
    key = (config.trainer.seed, step, epoch)
    lots = noise(key, batch.rows.tolist(), mask.shape[1])
    count = max(1, int(keys.clip_cov_ratio * number))
    batch.selected = largest(lots, candidates, count, ranks)


def _policy_objective(update: _Update, module: nn.Module, part: Part) -> Tensor:
    """agg(L w) - entropy_coeff agg(H) + kl_loss_coef agg(KL) of one micro-batch, a scalar."""
    section, batch, metrics = update.config.actor, update.batch, update.metrics
    micro, count = part.micro, part.micro.labels.numel()
    had_no_old_pass = batch.old_logprobs is None or batch.bypasses_old
    is_old_pass = had_no_old_pass and part.is_first
    reference = None
    if update.ref is not None:
        is_forward = section.kl_loss_type == "full_forward"
        reference = update.ref.reference(take_states(batch, micro), is_forward=is_forward)
    found = module(
        **micro.inputs,
        labels=micro.labels,
        temperature=update.config.rollout.temperature,
        with_entropy=section.entropy_coeff != 0 or is_old_pass,
        reference=reference,
    )
    logprobs = found.logprobs  # [K]
    sum_of_sequence = partial(update.batcher.sum_of_sequence, micro)
    old = logprobs.detach() if batch.old_logprobs is None else micro.take(batch.old_logprobs)
    assert batch.advantages is not None
    policy = POLICY_LOSSES[section.policy_loss.loss_mode](
        PolicyInputs(
            logprobs,
            old,
            micro.take(batch.advantages),
            keys=section,
            sum_of_sequence=sum_of_sequence,
            selected=None if batch.selected is None else micro.take(batch.selected),
        )
    )
    per_token = policy.loss
    if batch.loss_weights is not None:
        per_token = per_token * micro.take(batch.loss_weights)
    if batch.bypasses_old:
        engines = micro.take(batch.rollout_logprobs)
        correction = update.config.algorithm.correction
        per_token = per_token * correct_in_update(
            logprobs - engines, correction, sum_of_sequence, metrics
        )
    loss = (per_token * part.weights).sum()
    part.log_loss(metrics, "actor/pg_loss", loss)
    for name, values in policy.metrics.items():
        metrics.add(f"actor/{name}", values.sum(), count)
    metrics.add("actor/ppo_kl", kl_estimate(old, logprobs.detach(), "k1").sum(), count)
    metrics.add("actor/ppo_kl_k3", kl_estimate(old, logprobs.detach(), "k3").sum(), count)
    if is_old_pass:
        metrics.add("actor/entropy", found.entropy.detach().sum(), count)
        everything = torch.ones_like(micro.labels, dtype=torch.bool)
        engines = micro.take(batch.rollout_logprobs)
        diff = rollout_probs_diff(logprobs.detach(), engines, everything)
        metrics.add("training/rollout_probs_diff_mean", diff.mean * count, count)
        metrics.maximum("training/rollout_probs_diff_max", diff.max)
        if batch.old_logprobs is None and batch.ref_logprobs is not None:
            k3 = kl_estimate(logprobs.detach(), micro.take(batch.ref_logprobs), "k3")
            metrics.add("actor/ref_kl", k3.sum(), count)
    if section.entropy_coeff != 0:
        loss = loss - section.entropy_coeff * (found.entropy * part.weights).sum()
    if section.use_kl_loss:
        assert batch.ref_logprobs is not None
        kl = found.kl
        if kl is None:
            kl = kl_estimate(logprobs, micro.take(batch.ref_logprobs), section.kl_loss_type)
        kl_loss = (kl * part.weights).sum()
        part.log_loss(metrics, "actor/kl_loss", kl_loss)
        loss = loss + section.kl_loss_coef * update.guard.state.kl_factor * kl_loss
    return loss


def _value_objective(update: _Update, module: nn.Module, part: Part) -> Tensor:
    """The aggregated value loss of one micro-batch, a scalar."""
    batch, metrics = update.batch, update.metrics
    assert batch.values is not None and batch.returns is not None
    micro, count = part.micro, part.micro.labels.numel()
    values = module(**micro.inputs)  # [K]
    value = value_loss(
        values,
        batch.value_scale.normalised(micro.take(batch.values)),
        batch.return_scale.normalised(micro.take(batch.returns)),
        clip=update.config.critic.cliprange_value,
    )
    loss = (value.loss * part.weights).sum()
    part.log_loss(metrics, "critic/vf_loss", loss)
    metrics.add("critic/vf_clipfrac", value.clipped.sum(), count)
    predicted = batch.return_scale.denormalised(values.detach())
    metrics.add("critic/vpred_mean", predicted.sum(), count)
    return loss
