"""Which tokens have a large covariance of advantage and log-prob, whoever holds them."""

import pytest
import torch
import torch.distributed as dist

from ppo.selection import covariances, largest, noise
from tests.distributed import run_distributed

NAN = float("nan")


def table() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Advantages, log-probs and mask [6, 5]; what does not count is NaN."""
    g = torch.Generator().manual_seed(3)
    mask = torch.rand(6, 5, generator=g) > 0.3
    values = torch.randn(2, 6, 5, generator=g)
    advantages, logprobs = (torch.where(mask, x, NAN) for x in values)
    return advantages, logprobs, mask


def test_the_covariance_of_a_token_is_the_product_of_its_deviations():
    advantages = torch.tensor([[1.0, 3.0, NAN]])
    logprobs = torch.tensor([[-1.0, -2.0, NAN]])
    mask = torch.tensor([[True, True, False]])
    assert covariances(advantages, logprobs, mask).tolist() == [[-0.5, -0.5, 0.0]]


def test_the_largest_are_taken_among_the_candidates_alone_and_equal_ones_alike():
    values = torch.tensor([[5.0, 1.0, 3.0], [3.0, 4.0, 2.0]], dtype=torch.float64)
    candidates = torch.tensor([[False, True, True], [True, True, True]])
    assert largest(values, candidates, 1).tolist() == [[False] * 3, [False, True, False]]
    assert largest(values, candidates, 2).tolist() == [[False, False, True], [True, True, False]]
    assert largest(values, candidates, 99).equal(candidates)
    assert not largest(values, torch.zeros_like(candidates), 2).any()


def test_noise_belongs_to_a_sample_whoever_draws_it():
    whole = noise((1, 2, 3), [4, 5, 6], 7)
    assert noise((1, 2, 3), [6], 3).equal(whole[2:, :3])
    assert not noise((1, 2, 4), [6], 7).equal(whole[2:])
    assert noise((1, 2, 3), [], 7).shape == (0, 7)


def choose(rank: int, world_size: int) -> torch.Tensor:
    advantages, logprobs, mask = (x[rank::world_size] for x in table())
    group = dist.group.WORLD
    return largest(covariances(advantages, logprobs, mask, group), mask, 4, group)


@pytest.mark.distributed
def test_ranks_choose_together_what_one_chooses_of_all():
    want = largest(covariances(*table()), table()[2], 4)
    assert want.sum() == 4
    for rank, got in enumerate(run_distributed(choose, 2)):
        assert got.equal(want[rank::2])
