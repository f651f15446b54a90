import pytest
import torch
from torch import nn

from sharding.reshard.geometry import Piece
from sharding.reshard.shards import Shards

WHOLE = [(0, 0, 6, 4), (0, 0, 3, 1)]


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(24.0).view(6, 4))
        self.bias = nn.Parameter(torch.arange(100.0, 103.0))


def test_pieces_are_packed_one_after_the_other_and_cast():
    out = torch.empty(10, dtype=torch.bfloat16)
    relayed = {Piece(0, 10, 0, 1, 2): torch.tensor([7.0, 8.0])}
    pieces = [Piece(0, 1, 2, 3, 2), Piece(0, 10, 0, 1, 2), Piece(1, 1, 0, 2, 1)]
    assert Shards(Two(), WHOLE).pack(out, pieces, relayed) == 0
    assert out.tolist() == [6, 7, 10, 11, 14, 15, 7, 8, 101, 102]


def test_pieces_count_from_the_first_row_and_column_that_is_held():
    held = [(12, 8, 6, 4), (3, 0, 3, 1)]
    out = torch.empty(3)
    Shards(Two(), held).pack(out, [Piece(0, 13, 9, 1, 2), Piece(1, 5, 0, 1, 1)], {})
    assert out.tolist() == [5, 6, 102]


@pytest.mark.gpu
def test_offloaded_shards_come_to_the_device_one_parameter_at_a_time():
    out = torch.empty(8, dtype=torch.bfloat16, device="cuda")
    pieces = [Piece(0, 1, 2, 2, 2), Piece(1, 0, 0, 2, 1), Piece(0, 4, 0, 1, 2)]
    staged = Shards(Two(), WHOLE).pack(out, pieces, {})
    assert staged == 4 * 4 * 4  # local rows 1 to 4 of the weight, float32
    assert out.tolist() == [6, 7, 10, 11, 100, 101, 16, 17]
