"""Which tokens have a large covariance of advantage and log-prob, whoever holds them; weights and
rejections of tokens about which engine and trainer disagree."""

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ppo.config import RejectRule
from ppo.selection import (
    covariances,
    effective_sample_size,
    largest,
    noise,
    rollout_correction,
)
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


def sums_over(sequence: Tensor) -> Callable[[Tensor], Tensor]:
    """[K] -> [K]: sums over the tokens of each token's sequence."""
    size = int(sequence.max()) + 1 if len(sequence) else 0
    return lambda x: x.new_zeros(size).index_add_(0, sequence, x)[sequence]


OF = torch.tensor([0, 0, 1, 1, 1])
# ratios 1, 0.5 | 4, 1, 1
DIFFERENCE = torch.tensor([1.0, 0.5, 4.0, 1.0, 1.0]).log()


@pytest.mark.parametrize(
    ("level", "icepop", "expected"),
    [
        (None, None, [1, 1, 1, 1, 1]),
        ("token", None, [1, 0.5, 2, 1, 1]),  # ratio 4 is cut to 2
        ("sequence", None, [0.5, 0.5, 2, 2, 2]),
        (None, (0.6, 5.0), [1, 0, 1, 1, 1]),
        ("token", (0.6, 5.0), [1, 0, 2, 1, 1]),
        ("sequence", (0.4, 2.0), [0.5, 0.5, 0, 2, 2]),
    ],
)
def test_weights_by_hand(level, icepop, expected) -> None:
    found = rollout_correction(DIFFERENCE, sums_over(OF), level=level, threshold=2.0, icepop=icepop)
    torch.testing.assert_close(found.weights, torch.tensor(expected, dtype=torch.float32))
    assert found.kept.all() and not found.vetoed.any()
    largest = [0.5, 0.5, 4, 4, 4] if level == "sequence" else [1, 0.5, 4, 1, 1]
    assert found.ratios.tolist() == pytest.approx(largest)  # not truncated


@pytest.mark.parametrize(
    ("rule", "bounds", "expected"),
    [
        ("token_k1", (0.4, 3.0), [1, 1, 0, 1, 1]),
        ("token_k1", (0.6, 5.0), [1, 0, 1, 1, 1]),
        ("token_k2", (-math.inf, 0.3), [1, 1, 0, 1, 1]),  # 0.5 log(2)^2 = 0.24, 0.5 log(4)^2 = 0.96
        ("token_k3", (-math.inf, 0.2), [1, 1, 0, 1, 1]),  # 0.5 - 1 + log 2 = 0.193; 1.61
        ("seq_sum_k1", (0.6, 5.0), [0, 0, 1, 1, 1]),  # products 0.5 and 4
        ("seq_mean_k1", (0.5, 1.5), [1, 1, 0, 0, 0]),  # geometric means 0.71 and 1.59
        ("seq_sum_k2", (-math.inf, 0.9), [1, 1, 0, 0, 0]),
        ("seq_mean_k2", (-math.inf, 0.2), [1, 1, 0, 0, 0]),  # 0.12 and 0.32
        ("seq_sum_k3", (-math.inf, 0.1), [0, 0, 0, 0, 0]),
        ("seq_mean_k3", (-math.inf, 0.6), [1, 1, 1, 1, 1]),  # 0.097 and 0.538
        ("seq_max_k2", (-math.inf, 0.5), [1, 1, 0, 0, 0]),
        ("seq_max_k3", (-math.inf, 1.0), [1, 1, 0, 0, 0]),
    ],
)
def test_rejection_by_hand(rule, bounds, expected) -> None:
    found = rollout_correction(
        DIFFERENCE, sums_over(OF), level=None, threshold=2.0, reject={rule: bounds}
    )
    assert found.kept.tolist() == [bool(x) for x in expected]
    assert found.weights.tolist() == expected


def test_a_veto_takes_the_whole_sequence_and_every_rule_must_be_passed() -> None:
    found = rollout_correction(
        DIFFERENCE,
        sums_over(OF),
        level=None,
        threshold=2.0,
        reject={"token_k1": (0.1, 3.0), "token_k2": (-math.inf, 10.0)},
        veto=0.6,
    )
    assert found.vetoed.tolist() == [True, True, False, False, False]
    assert found.kept.tolist() == [False, False, False, True, True]


def kept_by(rule: str, low: float, high: float, d: list[float]) -> list[bool]:
    """Which tokens of one sequence a rule keeps, by plain Python."""
    scope, _, kind = rule.rpartition("_")
    of = {
        "k1": lambda x: x,
        "k2": lambda x: x * x / 2,
        "k3": lambda x: math.exp(max(-20, min(20, x))) - 1 - max(-20, min(20, x)),
    }[kind]
    values = [of(x) for x in d]
    if kind == "k1":
        low, high = math.log(low), math.log(high)
    if scope == "token":
        return [low <= v <= high for v in values]
    whole = {"seq_sum": math.fsum(values), "seq_mean": math.fsum(values) / len(d)}
    value = whole[scope] if scope in whole else max(values)
    return [low <= value <= high] * len(d)


@pytest.mark.parametrize("rule", get_args(RejectRule))
def test_rejection_of_ragged_sequences_is_that_of_a_loop_beyond_log_ratios_of_twenty(rule) -> None:
    g = torch.Generator().manual_seed(3)
    lengths = [1, 7, 2, 1, 12, 5]
    sequence = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    d = torch.randn(len(sequence), generator=g)
    d[9], d[20] = 60.0, -60.0
    low, high = (0.4, 3.0) if rule.endswith("k1") else (-math.inf, 0.8)
    found = rollout_correction(
        d, sums_over(sequence), level="sequence", threshold=3.0, reject={rule: (low, high)}
    )
    wanted = [x for i in range(6) for x in kept_by(rule, low, high, d[sequence == i].tolist())]
    assert found.kept.tolist() == wanted and 0 < sum(wanted) < len(wanted)
    assert found.weights.isfinite().all() and not found.weights[~found.kept].any()


def test_what_is_not_finite_passes_no_rule_and_spoils_its_own_sequence_alone() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        d = torch.tensor([0.1, bad, 0.1, 0.2, 0.0])
        for rule in get_args(RejectRule):
            bounds = (0.5, 2.0) if rule.endswith("k1") else (-math.inf, 5.0)
            found = rollout_correction(
                d, sums_over(OF), level="sequence", threshold=2.0, reject={rule: bounds}
            )
            first = [rule.startswith("token"), False]
            assert found.kept.tolist() == [*first, True, True, True], (rule, bad)
            assert found.weights[2:].isfinite().all()
            assert rule.startswith("token") or not found.weights[:2].any()
    for bad in (math.nan, -math.inf):
        d = torch.tensor([0.1, bad, 0.1, 0.2, 0.0])
        found = rollout_correction(d, sums_over(OF), level="token", threshold=2.0, veto=1e-4)
        assert found.vetoed.tolist() == [True, True, False, False, False]
        assert found.weights.isfinite().all()


def test_a_counted_nan_is_not_hidden_without_a_rule() -> None:
    d = torch.tensor([math.nan, 0.0, 0.0, 0.0, 0.0])
    found = rollout_correction(d, sums_over(OF), level="token", threshold=2.0)
    assert found.weights.isnan().tolist() == [True, False, False, False, False]


def test_no_tokens_are_no_error() -> None:
    none = torch.zeros(0)
    found = rollout_correction(
        none,
        sums_over(torch.zeros(0, dtype=torch.long)),
        level="sequence",
        threshold=2.0,
        reject={"seq_mean_k1": (0.5, 2.0), "seq_max_k3": (-math.inf, 1.0)},
        veto=0.1,
    )
    assert all(part.shape == (0,) for part in found)
    assert float(effective_sample_size(none)) == 0.0


def test_effective_sample_size_by_hand() -> None:
    # (1 + .5 + 2 + .5)^2 / (4 (1 + .25 + 4 + .25)) = 16 / 22
    weights = torch.tensor([1.0, 0.5, 2.0, 0.5])
    assert float(effective_sample_size(weights)) == pytest.approx(16 / 22)
    assert float(effective_sample_size(torch.ones(6))) == pytest.approx(1.0)
