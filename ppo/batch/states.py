"""Last hidden states of the reference at the response tokens of a rank's rows, on the host.

Owns how they lie there: one vector a response token, one row of the batch after the other, without
padding; pinned where the device is a GPU, so that copies run while the host goes on. Must not know
what is computed from them.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ppo.batch.packing import MicroBatch
from ppo.batch.samples import RolloutBatch
from sharding.mesh import Mesh


def put_states(batch: RolloutBatch, micro: MicroBatch, states: Tensor, mesh: Mesh) -> None:
    """Keep the states [K, H] of a micro-batch in batch.ref_hidden [n, H], made by the first call.

    Each rank of an sp group has computed some tokens of its rows, and is to have all. A copy from
    the device is done when the device's stream is. Collective over the sp group.
    """
    lengths = batch.all.response_lengths[batch.rows]  # [b]
    if batch.ref_hidden is None:
        shape = int(lengths.sum()), states.shape[1]
        on_gpu = mesh.device.type == "cuda"
        batch.ref_hidden = torch.empty(shape, dtype=states.dtype, pin_memory=on_gpu)
    mine = lengths[micro.sequences]  # [r]
    ends = mine.cumsum(0)
    found = states.new_zeros(int(mine.sum()), states.shape[1])  # a row after the other
    places = (ends - mine)[micro.numbers] + micro.cols  # [K]
    found.index_copy_(0, micro.put(places), states)
    if mesh.dims.sp > 1 and found.numel():
        dist.all_reduce(found, group=mesh.sp_group)  # one rank has each token, the others zeros
    starts = (lengths.cumsum(0) - lengths)[micro.sequences].tolist()
    for part, start in zip(found.split(mine.tolist()), starts, strict=True):
        batch.ref_hidden[start : start + len(part)].copy_(part, non_blocking=True)


def take_states(batch: RolloutBatch, micro: MicroBatch) -> Tensor:
    """The states [K, H] of the scored tokens of a micro-batch, on the device of its labels."""
    hidden = batch.ref_hidden
    assert hidden is not None
    lengths = batch.all.response_lengths[batch.rows]
    index = (lengths.cumsum(0) - lengths)[micro.rows] + micro.cols  # [K]
    result = hidden.new_empty(len(index), hidden.shape[1], device=micro.labels.device)
    # tokens that follow each other there are copied at once: no gathered copy on the host
    borders = (index.diff() != 1).nonzero()[:, 0].add(1).tolist()
    for first, end in zip([0, *borders], [*borders, len(index)], strict=True):
        if end > first:
            start = int(index[first])
            result[first:end].copy_(hidden[start : start + end - first], non_blocking=True)
    return result
