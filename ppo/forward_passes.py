"""Forward passes over the rollout batch without gradients."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ppo.batch import RolloutBatch
from ppo.metrics import Metrics
from ppo.packing import Batcher, MicroBatch
from ppo.run.run import Run
from sharding.fsdp import without_gradients
from sharding.offload import to_device


def _forward_all(
    module: nn.Module,
    batch: RolloutBatch,
    parts: Sequence[Sequence[int]],
    batcher: Batcher,
    run: Run,
    compute: Callable[[MicroBatch], Tensor],
) -> Tensor:
    """Run every part of the batch through the module; [B, T] on the host, whole on every rank.

    A stop request ends the pass: it is made again after the restart.
    """
    result = torch.zeros(batch.response_mask.shape, device=batcher.mesh.device)  # [B, T]
    plan = (indices for part in parts for indices in batcher.plan(batch, part))
    with without_gradients(module):
        for indices in run.polled(plan):
            micro = batcher.make(batch, indices)
            rows, cols = (to_device(x, result.device) for x in (micro.rows, micro.cols))
            result[rows, cols] = compute(micro)
    batcher.mesh.all_reduce(result)  # every entry is set on one rank; the others add zero
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

    def compute(micro: MicroBatch) -> Tensor:
        found = module(
            **micro.inputs,
            labels=micro.labels,
            temperature=temperature,
            with_entropy=metrics is not None,
        )
        if metrics is not None:
            metrics.add("actor/entropy", found.entropy.sum(), micro.labels.numel())
        return found.logprobs

    return _forward_all(module, batch, parts, batcher, run, compute)


def response_values(
    module: nn.Module, batch: RolloutBatch, *, batcher: Batcher, run: Run
) -> Tensor:
    """Values of the states before each response token, [B, T] float32 on the host of every rank."""
    everything = list(range(len(batch)))
    return _forward_all(
        module, batch, [everything], batcher, run, lambda micro: module(**micro.inputs)
    )
