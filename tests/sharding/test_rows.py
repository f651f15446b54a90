"""Ragged rows moved between ranks: each arrives whole, in order, wherever it came from."""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sharding.mesh import ParallelDims, build_mesh, init_distributed
from sharding.rows import RowExchange
from tests.distributed import run_distributed

ROWS = 23


def table() -> tuple[Tensor, list[Tensor]]:
    """Lengths, some of them 0, and the rows; every number is there once."""
    lengths = torch.randint(0, 6, (ROWS,), generator=torch.Generator().manual_seed(1))
    return lengths, list(
        torch.arange(int(lengths.sum()), dtype=torch.int32).split(lengths.tolist())
    )


def layouts(dp: int) -> list[Tensor]:
    """Owners of each row: at random, all on the last rank, in turn."""
    g = torch.Generator().manual_seed(2)
    everything = torch.full((ROWS,), dp - 1)
    return [torch.randint(0, dp, (ROWS,), generator=g), everything, torch.arange(ROWS) % dp]


def move_through_all(rank: int, world_size: int, sp: int) -> list[bool]:
    """From the ranks that made the rows through every layout; whether each was as it should be."""
    dims = ParallelDims(world_size=world_size, ranks_per_node=world_size, sp=sp)
    mesh = build_mesh(dims, torch.device("cpu"))
    lengths, rows = table()
    holders = torch.arange(ROWS) * 7 % 3  # rank 3 holds none
    held, right = [rows[i] for i in range(ROWS) if holders[i] == rank], []
    for owners in layouts(mesh.dims.dp):
        exchange = RowExchange(holders, owners, mesh)
        moved = exchange.move(torch.cat([rows[0][:0], *held]), lengths)
        wanted = [i for i in range(ROWS) if owners[i] == mesh.dp_rank]
        right.append(exchange.owned.tolist() == wanted)
        right.append(torch.equal(moved, torch.cat([rows[0][:0], *(rows[i] for i in wanted)])))
        holders = owners * sp
        held = [rows[i] for i in wanted] if mesh.sp_rank == 0 else []
    return right


@pytest.mark.distributed
def test_rows_arrive_whole_and_in_order_whoever_held_them():
    for sp in (1, 2):
        for right in run_distributed(move_through_all, 4, sp):
            assert right == [True] * 6, sp


def test_rows_that_their_holder_gives_up_are_gone_before_they_are_received(monkeypatch):
    alive, exchange_all = [], dist.all_to_all_single
    rows = [torch.ones(6, 4)]
    given = weakref.ref(rows[0])

    def watched(*args: Any, **keys: Any) -> Any:
        alive.append(given() is not None)
        return exchange_all(*args, **keys)

    with init_distributed(torch.device("cpu")):
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), torch.device("cpu"))
        nowhere = torch.zeros(2, dtype=torch.long)
        exchange = RowExchange(nowhere, nowhere, mesh)
        monkeypatch.setattr(dist, "all_to_all_single", watched)
        moved = exchange.take(rows, torch.tensor([2, 4]))
    assert torch.equal(moved, torch.ones(6, 4)) and alive == [False]
