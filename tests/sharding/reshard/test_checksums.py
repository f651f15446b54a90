from typing import Any

import pytest
import torch

from sharding.layout import Layout
from sharding.reshard import checksums
from sharding.reshard.checksums import Checksums, checksum
from sharding.reshard.plan import Entry
from sharding.reshard.resharder import Bucket


def by_hand(tensor: torch.Tensor) -> int:
    """The formula with Python's integers."""
    bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    total = 0
    for index, value in enumerate(bits.flatten().tolist()):
        total += value * ((index * 0x1E3779B97F4A7C15) % 2**64 | 1)
    total %= 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksum_is_the_sum_of_bits_times_odd_factors(dtype):
    tensor = torch.randn(7, 5).to(dtype)
    assert checksum(tensor).item() == by_hand(tensor)
    assert checksum(torch.zeros(7, 5, dtype=dtype)).item() == 0
    assert checksum(tensor[0]).item() == by_hand(tensor[0])  # a vector
    assert checksum(tensor[:, 2:2]).item() == checksum(tensor[:0]).item() == 0


def test_a_row_that_is_wider_than_what_is_looked_at_once_is_cut(monkeypatch):
    tensor = torch.randn(3, 4, 5)
    monkeypatch.setattr(checksums, "_CUT", 7)
    assert checksum(tensor).item() == by_hand(tensor)


def test_blocks_of_a_large_tensor_sum_up_to_the_whole():
    tensor = torch.randn(3000, 400)  # more than is looked at in one cut
    blocks = [(0, 0, 1000, 400), (1000, 0, 2000, 100), (1000, 100, 2000, 300)]
    parts = [
        checksum(tensor[r : r + rows, c : c + cols], row=r, col=c, width=400)
        for r, c, rows, cols in blocks
    ]
    assert torch.stack(parts).sum() == checksum(tensor)


def test_every_single_changed_element_and_swapped_rows_are_seen():
    tensor = torch.randn(4, 6, dtype=torch.bfloat16)
    good = checksum(tensor).item()
    for index in range(24):
        changed = tensor.clone()
        changed.view(torch.int16).view(-1)[index] ^= 1
        assert checksum(changed).item() != good
    assert checksum(tensor[[1, 0, 2, 3]]).item() != good


def test_checksums_of_buckets_name_the_parameter_that_differs():
    whole: dict[str, Any] = {
        "a": torch.randn(4, 3),
        "b": torch.randn(5),
        "padding": torch.zeros(2, 3),
    }
    layout = Layout(targets={"a": (4, 3), "b": (5, 1), "padding": (2, 3)})
    sums = Checksums(layout)
    upper, lower = whole["a"][:1], whole["a"][1:]
    sums.add(
        Bucket(
            torch.cat([lower.flatten(), whole["b"]]),
            [Entry("a", 1, 0, 3, 3, 0), Entry("b", 0, 0, 5, 1, 9)],
            [],
        )
    )
    sums.add(Bucket(upper.flatten(), [Entry("a", 0, 0, 1, 3, 0)], []))
    assert sums.differing(whole) == []
    assert sums.differing(whole | {"b": whole["b"].roll(1)}) == ["b"]
    assert sums.differing(whole | {"padding": torch.ones(2, 3)}) == ["padding"]
    assert sums.differing({"a": whole["a"], "b": whole["b"]}) == ["padding"]
