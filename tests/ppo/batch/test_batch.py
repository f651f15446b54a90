"""How the rollout batch is cut: membership, alignment of packed and padded rows."""

import pytest
import torch

from ppo.batch.packing import make_micro_batch
from ppo.batch.samples import RolloutBatch, mini_batches
from ppo.data.dataset import Prompt
from ppo.engines.contract import Completion
from tests.ppo.batches import make_batch, responses

CPU = torch.device("cpu")


def make(lengths: list[tuple[int, int]], n: int = 1) -> RolloutBatch:
    """A batch of (prompt, response) lengths; token ids count up, so that each one is unique."""
    counter = iter(range(1, 10_000))
    prompts, completions = [], []
    for number, (p, r) in enumerate(lengths):
        ids = [next(counter) for _ in range(p)]
        response = [next(counter) for _ in range(r)]
        if number % n == 0:
            prompts.append(Prompt(number, ids, "copy", "", {}, []))
        completions.append(Completion(response, [-float(t) for t in response], "stop"))
    return make_batch(prompts, completions)


def test_the_batch_keeps_samples_of_a_prompt_adjacent_and_masks_padding():
    batch = make([(2, 3), (2, 1), (4, 2), (4, 3)], n=2)
    assert batch.all.group_ids.tolist() == [0, 0, 1, 1]
    assert batch.response_mask.tolist() == [
        [True, True, True],
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]
    assert batch.rollout_logprobs[1].tolist() == [-float(responses(batch)[1][0]), 0.0, 0.0]
    assert batch.lengths.tolist() == [5, 3, 6, 7]


def test_mini_batches_hold_whole_groups_in_order_or_shuffled_by_the_seed():
    groups = torch.arange(5).repeat_interleave(2)
    parts = mini_batches(groups, num_prompts=2)
    assert [p.tolist() for p in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    shuffled = mini_batches(groups, num_prompts=2, seed=3)
    assert sorted(i for p in shuffled for i in p.tolist()) == list(range(10))
    assert [p.tolist() for p in shuffled] != [p.tolist() for p in parts]
    again = mini_batches(groups, num_prompts=2, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(shuffled, again, strict=True))
    for part in shuffled:
        for group in groups[part].unique():
            assert int((groups[part] == group).sum()) == 2


@pytest.mark.parametrize("sp", [1, 2, 4])
def test_packed_positions_point_at_the_token_before_each_label(sp):
    batch = make([(2, 3), (1, 1), (4, 6)])
    seen = set()
    rows, response_ids = [], responses(batch)
    for rank in range(sp):
        micro = make_micro_batch(batch, [2, 0, 1], device=CPU, sp=sp, sp_rank=rank)
        rows.append(micro.inputs["input_ids"])
        seen |= set(zip(micro.rows.tolist(), micro.cols.tolist(), strict=True))
        for row, col, label in zip(micro.rows, micro.cols, micro.labels, strict=True):
            assert response_ids[row][col] == label
    row = torch.cat(rows, 1)[0].tolist()
    assert row[:17] == torch.cat(batch.documents([2, 0, 1])).tolist()
    assert len(row) % sp == 0
    assert seen == {(i, t) for i in range(3) for t in range(len(response_ids[i]))}
    full = make_micro_batch(batch, [2, 0, 1], device=CPU)
    before = [row[j] for j in full.inputs["positions"].tolist()]
    assert all(b == label - 1 for b, label in zip(before, full.labels.tolist(), strict=True))
    assert full.inputs["cu_seqlens"].tolist() == [0, 10, 15, 17]
    assert full.inputs["position_ids"][0].tolist() == [*range(10), *range(5), *range(2)]


def test_padded_rows_score_the_same_tokens_as_the_packed_row():
    batch = make([(2, 3), (1, 1), (4, 6)])
    padded = make_micro_batch(batch, [0, 1, 2], device=CPU, packed=False)
    packed = make_micro_batch(batch, [0, 1, 2], device=CPU)
    assert padded.labels.tolist() == packed.labels.tolist()
    assert padded.inputs["input_ids"].shape == (3, 10)
    flat = padded.inputs["input_ids"].reshape(-1)
    before = flat[padded.inputs["positions"]]
    assert (before + 1).tolist() == padded.labels.tolist()
    assert padded.num_tokens == 17 and padded.num_padding == 13


def test_a_failed_sample_and_an_empty_micro_batch_score_nothing():
    batch = make([(2, 3), (1, 1)])
    batch.response_mask[0] = False
    micro = make_micro_batch(batch, [0, 1], device=CPU)
    assert micro.rows.tolist() == [1]
    empty = make_micro_batch(batch, [], device=CPU)
    assert empty.labels.numel() == 0 and empty.num_tokens == 0
    assert empty.inputs["input_ids"].shape == (1, 1)
    assert micro.take(torch.tensor([[1.0, 2, 3], [4.0, 5, 6]])).tolist() == [4.0]
