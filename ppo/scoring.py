"""Forward-only passes over the rollout batch.

Owns how a batch is run through a model without gradients and how results come back to every rank.
Knows no loss and no optimizer; the order of the steps is train_ppo.py's alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ppo.batch import Budget, MicroBatch, RolloutBatch, make_micro_batch, partition, to_device
from ppo.metrics import Metrics
from ppo.run import Run
from sharding.fsdp import forward_pass
from sharding.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Batcher:
    """Cuts sequences into this rank's micro-batches under one budget.

    packed: one row without padding (`model.use_remove_padding`), else right-padded rows.
    """

    mesh: Mesh
    budget: Budget
    packed: bool
    pad_id: int

    def plan(self, batch: RolloutBatch, indices: Sequence[int]) -> list[list[int]]:
        """Sequences of each of this rank's micro-batches; every rank has equally many.

        Samples without a token that counts are left out.
        """
        counting = batch.response_mask.any(-1)
        kept = [i for i in indices if counting[i]]
        return partition(batch.lengths, kept, self.budget)[self.mesh.dp_rank]

    def make(self, batch: RolloutBatch, indices: Sequence[int]) -> MicroBatch:
        """Tensors of one micro-batch, on the device."""
        return make_micro_batch(
            batch,
            indices,
            device=self.mesh.device,
            packed=self.packed,
            sp=self.mesh.dims.sp,
            sp_rank=self.mesh.sp_rank,
            pad_id=self.pad_id,
        )


def _forward_all(
    module: nn.Module,
    batch: RolloutBatch,
    parts: Sequence[Sequence[int]],
    batcher: Batcher,
    run: Run,
    score: Callable[[MicroBatch], Tensor],
) -> Tensor:
    """Run every part of the batch through the module; [B, T] on the host, whole on every rank.

    A stop request ends the pass: it is made again after the restart.
    """
    result = torch.zeros(batch.response_mask.shape, device=batcher.mesh.device)  # [B, T]
    with forward_pass(module):
        for part in parts:
            for indices in batcher.plan(batch, part):
                if run.should_stop():
                    run.raise_stop()
                micro = batcher.make(batch, indices)
                rows, cols = (to_device(x, result.device) for x in (micro.rows, micro.cols))
                result[rows, cols] = score(micro)
    dist.all_reduce(result)  # every entry is set on one rank; the others add zero
    return result.cpu()


def response_logprobs(
    module: nn.Module,
    batch: RolloutBatch,
    parts: Sequence[Sequence[int]],
    *,
    batcher: Batcher,
    run: Run,
    temperature: float,
    metrics: Metrics | None = None,
) -> Tensor:
    """Log-probabilities of the response tokens, [B, T] float32 on the host of every rank.

    Args:
        parts: index lists; each is laid out by itself (the update's mini-batches, so that the
            first ratio is exactly 1, or one part with everything).
        metrics: given, actor/entropy is added to it.
    """

    def score(micro: MicroBatch) -> Tensor:
        scores = module(
            **micro.inputs,
            labels=micro.labels,
            temperature=temperature,
            with_entropy=metrics is not None,
        )
        if metrics is not None:
            metrics.add("actor/entropy", scores.entropy.sum(), micro.labels.numel())
        return scores.logprobs

    return _forward_all(module, batch, parts, batcher, run, score)


def response_values(
    module: nn.Module, batch: RolloutBatch, *, batcher: Batcher, run: Run
) -> Tensor:
    """Values of the states before each response token, [B, T] float32 on the host of every rank."""
    everything = list(range(len(batch.prompts)))
    return _forward_all(
        module, batch, [everything], batcher, run, lambda micro: module(**micro.inputs)
    )
