"""Host memory in blocks: little of it is lost."""

import pytest

from ppo.model_shapes import find_shape
from sharding.host_memory import HostBlocks


@pytest.mark.parametrize(("model", "ranks"), [("Qwen2.5-7B", 8), ("Qwen2.5-32B", 32)])
def test_the_shards_of_a_model_take_few_per_cent_more_than_they_have(model: str, ranks: int):
    """Each alone, rounded up to a power of two as torch does, they would take 30 to 90 % more."""
    found = find_shape(f"Qwen/{model}-Instruct")
    assert found is not None
    shape = found[0]
    hidden, kv = shape.hidden_size, shape.num_kv_heads * shape.head_dim
    layer = [hidden * hidden] * 2 + [hidden * kv] * 2 + [hidden * shape.intermediate_size] * 3
    weights = [*[shape.embedding_params] * 2, *(layer * shape.num_layers)]
    sizes = [4 * size // ranks for size in weights] * 3  # with the moments of Adam
    blocks = HostBlocks()  # memory of which nothing is written to costs nothing
    pieces = blocks.take(sizes, pinned=False)
    assert [len(piece) for piece in pieces] == sizes
    assert all(piece.storage_offset() % 512 == 0 for piece in pieces)
    taken = [block.numel() for block, _ in blocks._blocks[False]]
    assert all(size == 1 << (size.bit_length() - 1) for size in taken)
    alone = sum(1 << (size - 1).bit_length() for size in sizes)
    assert sum(taken) < 1.06 * sum(sizes) < 1.3 * sum(sizes) < alone


def test_pieces_of_a_block_do_not_overlap_and_later_ones_fill_what_is_left():
    blocks = HostBlocks()
    first = blocks.take([100, 0, 1500], pinned=False)
    for value, piece in enumerate(first, 1):
        piece.fill_(value)
    [later] = blocks.take([90], pinned=False)
    later.fill_(9)
    assert [piece.unique().tolist() for piece in first] == [[1], [], [3]]
    storages = {piece.untyped_storage().data_ptr() for piece in first}
    assert later.untyped_storage().data_ptr() in storages
