"""Forward passes over this rank's rows of the batch, without gradients."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ppo.batch.packing import Batcher, MicroBatch
from ppo.batch.samples import RolloutBatch
from ppo.batch.states import put_states
from ppo.metrics import Metrics
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
    """Run this rank's rows of every part through the module; [b, T] on the host.

    A stop request ends the pass: it is made again after the restart.
    """
    mesh = batcher.mesh
    result = torch.zeros(batch.response_mask.shape, device=mesh.device)  # [b, T]
    plan = (indices for part in batcher.plan(batch, parts) for indices in part)
    with without_gradients(module):
        for indices in run.polled(plan):
            micro = batcher.make(batch, indices)
            rows, cols = (to_device(x, result.device) for x in (micro.rows, micro.cols))
            result[rows, cols] = compute(micro)
    if mesh.dims.sp > 1:  # one rank of the group has set each entry; the others add zero
        dist.all_reduce(result, group=mesh.sp_group)
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
    keep_hidden: bool = False,
) -> Tensor:
    """Log-probabilities of the response tokens, [b, T] float32 on the host.

    Args:
        parts: numbers of samples; each is laid out by itself (the update's mini-batches, so that
            the first ratio is exactly 1, or one part with everything).
        metrics: given, actor/entropy is added to it.
        keep_hidden: the last hidden states stay in batch.ref_hidden.
    """

    def compute(micro: MicroBatch) -> Tensor:
        found = module(
            **micro.inputs,
            labels=micro.labels,
            temperature=temperature,
            with_entropy=metrics is not None,
            with_hidden=keep_hidden,
        )
        if keep_hidden:
            put_states(batch, micro, found.hidden, batcher.mesh)
        if metrics is not None:
            metrics.add("actor/entropy", found.entropy.sum(), micro.labels.numel())
        return found.logprobs

    return _forward_all(module, batch, parts, batcher, run, compute)


def response_values(
    module: nn.Module, batch: RolloutBatch, *, batcher: Batcher, run: Run
) -> Tensor:
    """Values of the states before each response token, [b, T] float32 on the host."""
    everything = list(range(len(batch.all)))
    return _forward_all(
        module, batch, [everything], batcher, run, lambda micro: module(**micro.inputs)
    )
