"""Rows of ragged tables, such as the tokens of sequences, moved between ranks.

Owns which rank sends what to whom. Must not know what the rows hold.
"""

from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.mesh import Mesh


class RowExchange:
    """Moves rows from the ranks that hold them to the ranks that are to hold them.

    Every rank knows both layouts, so that lengths alone say what comes from where. Rows are in
    ascending order on every rank, before and after: the result does not depend on who held what.
    """

    def __init__(self, holders: Tensor, owners: Tensor, mesh: Mesh) -> None:
        """
        Args:
            holders: [B] rank that has each row.
            owners: [B] dp rank that is to have it, which are all ranks of an sp group.
        """
        self._group = mesh.host_group
        ranks = range(mesh.dims.world_size)
        self._held = (holders == mesh.rank).nonzero()[:, 0]
        self.owned = (owners == mesh.dp_rank).nonzero()[:, 0]
        """[b] rows that this rank is to have, ascending"""
        wanted_by = owners[self._held]
        self._sent = [(wanted_by == rank // mesh.dims.sp).nonzero()[:, 0] for rank in ranks]
        source = holders[self.owned]
        self._received = [(source == rank).nonzero()[:, 0] for rank in ranks]

    def move(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Rows here, one after the other, to owned rows, one after the other. Collective.

        Args:
            values: host tensor, the rows that this rank holds, cut along its first dim.
            lengths: [B] of each row.
        """
        return self.take([values], lengths)

    def take(self, given: list[Tensor], lengths: Tensor) -> Tensor:
        """`move` of the one tensor of a list, which is empty when the rows are received: for what
        is large, and held by nobody else."""
        values = given.pop()
        held, owned = lengths[self._held], lengths[self.owned]
        rows = values.split(held.tolist())
        parts = [rows[i] for indices in self._sent for i in indices.tolist()]
        out_sizes = [int(owned[indices].sum()) for indices in self._received]
        sent = torch.cat(parts) if parts else values[:0]
        del values, rows, parts  # two copies at a time
        result = sent.new_empty(sum(out_sizes), *sent.shape[1:])
        if sent.dim() > 1:  # as bytes: gloo does not know every dtype
            sent, received = sent.view(torch.uint8), result.view(torch.uint8)
        else:
            received = result
        dist.all_to_all_single(
            received,
            sent,
            out_sizes,
            [int(held[indices].sum()) for indices in self._sent],
            group=self._group,
        )
        del sent, received
        order = torch.cat(self._received)  # of the rows as they have come
        return _cat_in_order(result, owned[order].tolist(), order.argsort().tolist())


def _cat_in_order(values: Tensor, lengths: list[int], order: list[int]) -> Tensor:
    """The rows of `values`, whose lengths are given, in another order."""
    if order == list(range(len(order))):
        return values
    starts = list(accumulate(lengths, initial=0))
    return torch.cat([values[starts[i] : starts[i + 1]] for i in order])
