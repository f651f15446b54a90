"""Advantages against plain Python loops and numbers worked out by hand."""

import math
import random
import statistics

import pytest
import torch

from ppo.advantages import (
    gae,
    grpo,
    masked_mean,
    masked_whiten,
    opo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from tests.distributed import run_distributed

LENGTHS = [7, 1, 4, 9, 0, 2]
WIDTH = 9


def ragged(seed: int, *, holes: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards, values [6, 9] in float64 with NaN outside the mask, and the mask."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(WIDTH)[None] < torch.tensor(LENGTHS)[:, None]
    if holes:
        mask &= torch.rand(mask.shape, generator=generator) < 0.7
    rewards = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    values = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    rewards[~mask], values[~mask] = math.nan, math.inf
    return rewards, values, mask


def counted(x: torch.Tensor, mask: torch.Tensor) -> list[float]:
    return [v for row, keep in zip(x.tolist(), mask.tolist(), strict=True)
            for v, k in zip(row, keep, strict=True) if k]  # fmt: skip


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.99, 0.0)])
def test_gae_equals_the_sum_of_discounted_td_errors(holes: bool, gamma: float, lam: float) -> None:
    rewards, values, mask = ragged(0, holes=holes)
    result = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for row in range(len(LENGTHS)):
        where = [t for t in range(WIDTH) if mask[row, t]]
        r = [float(rewards[row, t]) for t in where]
        v = [float(values[row, t]) for t in where] + [0.0]
        for i, t in enumerate(where):
            expected = 0.0
            for k in range(i, len(where)):  # the definition, eq. 16, not the recursion
                expected += (gamma * lam) ** (k - i) * (r[k] + gamma * v[k + 1] - v[k])
            assert float(result.advantages[row, t]) == pytest.approx(expected, abs=1e-12)
            assert float(result.returns[row, t]) == pytest.approx(expected + v[i], abs=1e-12)
    assert (result.advantages[~mask] == 0).all()
    assert (result.returns[~mask] == 0).all()


def test_gae_by_hand() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    values = torch.tensor([[0.5, 0.25, 0.5]])
    mask = torch.tensor([[True, True, True]])
    # deltas 0.5*0.25-0.5 = -0.375, 0.5*0.5-0.25 = 0, 1-0.5 = 0.5; gamma lam = 0.25
    result = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    torch.testing.assert_close(result.advantages, torch.tensor([[-0.34375, 0.125, 0.5]]))
    torch.testing.assert_close(result.returns, torch.tensor([[0.15625, 0.375, 1.0]]))


def test_gae_with_gamma_and_lam_one_returns_the_reward_to_go() -> None:
    rewards, values, mask = ragged(1)
    result = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    for row, length in enumerate(LENGTHS):
        to_go = [math.fsum(rewards[row, t:length].tolist()) for t in range(length)]
        assert result.returns[row, :length].tolist() == pytest.approx(to_go)


def test_extra_padding_changes_no_advantage() -> None:
    rewards, values, mask = ragged(2)
    plain = gae(rewards, values, mask, gamma=0.9, lam=0.9)
    pad = torch.nn.functional.pad
    padded = gae(
        pad(rewards, (0, 4), value=math.nan),
        pad(values, (0, 4), value=math.nan),
        pad(mask, (0, 4), value=False),
        gamma=0.9,
        lam=0.9,
    )
    assert torch.equal(padded.advantages[:, :WIDTH], plain.advantages)


def test_masked_mean_counts_only_the_mask_and_survives_an_empty_one() -> None:
    x, _, mask = ragged(3)
    assert float(masked_mean(x, mask)) == pytest.approx(statistics.fmean(counted(x, mask)))
    assert float(masked_mean(x, torch.zeros_like(mask))) == 0.0
    assert float(masked_mean(torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2) > 0)) == 1.0


def test_masked_garbage_reaches_no_gradient() -> None:
    x, _, mask = ragged(4)
    x.requires_grad_()
    (masked_mean(x, mask) + masked_whiten(x, mask).square().sum()).backward()
    assert x.grad is not None and x.grad.isfinite().all()
    assert (x.grad[~mask] == 0).all()


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_whitened_values_have_mean_zero_and_unbiased_std_one(offset: float) -> None:
    x, _, mask = ragged(5)
    whitened = masked_whiten((3.0 * x + offset).float(), mask)
    values = counted(whitened, mask)
    assert statistics.fmean(values) == pytest.approx(0.0, abs=1e-3 if offset else 1e-6)
    assert statistics.stdev(values) == pytest.approx(1.0, abs=1e-3 if offset else 1e-6)
    assert (whitened[~mask] == 0).all()


def test_whitening_equal_values_or_one_value_gives_zeros() -> None:
    mask = torch.tensor([[True, True, False]])
    assert masked_whiten(torch.tensor([[2.0, 2.0, 9.0]]), mask).tolist() == [[0.0, 0.0, 0.0]]
    single = torch.tensor([[True, False, False]])
    assert masked_whiten(torch.tensor([[2.0, 5.0, 9.0]]), single).tolist() == [[0.0, 0.0, 0.0]]


def test_whitening_adds_epsilon_inside_the_root() -> None:
    # values +-1e-4: unbiased variance 2e-8, so 1e-4 / sqrt(2e-8 + 1e-8) = 1 / sqrt(3)
    whitened = masked_whiten(
        torch.tensor([[1e-4, -1e-4]], dtype=torch.float64), torch.tensor([[True, True]])
    )
    assert whitened.tolist() == [pytest.approx([3**-0.5, -(3**-0.5)])]


def _whiten_part(rank: int, world_size: int, rows: list[list[int]]) -> list[list[float]]:
    x, _, mask = ragged(6)
    group = torch.distributed.group.WORLD
    return masked_whiten(x[rows[rank]], mask[rows[rank]], group=group).tolist()


@pytest.mark.distributed
def test_whitening_over_two_ranks_with_uneven_lengths_equals_one_process() -> None:
    x, _, mask = ragged(6)
    rows = [[0, 3, 5], [1, 2, 4]]  # 18 and 5 counted tokens
    parts = run_distributed(_whiten_part, 2, rows)
    whole = masked_whiten(x, mask)
    for part, mine in zip(parts, rows, strict=True):
        torch.testing.assert_close(torch.tensor(part, dtype=torch.float64), whole[mine])


def test_grpo_equals_a_loop_over_groups_in_any_order() -> None:
    shuffled = random.Random(0)
    groups = [3, 3, 3, 3, 8, 8, 8, 11, 5, 5]
    shuffled.shuffle(groups)
    scores = [shuffled.uniform(-2, 2) for _ in groups]
    for norm_by_std in (True, False):
        result = grpo(
            torch.tensor(scores, dtype=torch.float64),
            torch.tensor(groups),
            norm_by_std=norm_by_std,
        )
        for i, group in enumerate(groups):
            members = [s for s, g in zip(scores, groups, strict=True) if g == group]
            alone = len(members) == 1
            mean = 0.0 if alone else statistics.fmean(members)
            std = 1.0 if alone else statistics.stdev(members)
            expected = (scores[i] - mean) / (std + 1e-6) if norm_by_std else scores[i] - mean
            assert float(result[i]) == pytest.approx(expected, rel=1e-12)


def test_grpo_by_hand() -> None:
    scores, groups = torch.tensor([1.0, 0.0, 0.0, 1.0, 4.0]), torch.tensor([0, 0, 1, 1, 2])
    assert grpo(scores, groups, norm_by_std=False).tolist() == [0.5, -0.5, -0.5, 0.5, 4.0]
    # two scores one apart have unbiased std 1 / sqrt(2)
    assert grpo(scores, groups, norm_by_std=True).tolist() == pytest.approx(
        [0.70710, -0.70710, -0.70710, 0.70710, 4.0], abs=1e-4
    )


def test_grpo_of_equal_scores_is_zero() -> None:
    scores = torch.full((4,), 0.3)
    assert grpo(scores, torch.zeros(4, dtype=torch.long), norm_by_std=True).abs().max() < 1e-6


def shuffled_groups(seed: int) -> tuple[list[float], list[int], list[int]]:
    """Scores, lengths and groups (of 4, 3, 2 and 1) in mixed order."""
    source = random.Random(seed)
    groups = [3, 3, 3, 3, 8, 8, 8, 11, 5, 5]
    source.shuffle(groups)
    lengths = [source.randint(1, 9) for _ in groups]
    return [source.uniform(-2, 2) for _ in groups], lengths, groups


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    scores, _, groups = shuffled_groups(1)
    result = rloo(torch.tensor(scores, dtype=torch.float64), torch.tensor(groups))
    for i, group in enumerate(groups):
        others = [
            s for j, (s, g) in enumerate(zip(scores, groups, strict=True)) if g == group and j != i
        ]
        expected = scores[i] - (statistics.fmean(others) if others else 0.0)
        assert float(result[i]) == pytest.approx(expected, rel=1e-12)
    assert rloo(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([7, 7, 7])).tolist() == [1, -0.5, -0.5]
    assert rloo(torch.full((3,), 0.1), torch.zeros(3, dtype=torch.long)).abs().max() < 1e-12


def test_opo_weighs_the_baseline_by_length() -> None:
    scores, lengths, groups = shuffled_groups(2)
    result = opo(
        torch.tensor(scores, dtype=torch.float64), torch.tensor(lengths), torch.tensor(groups)
    )
    for i, group in enumerate(groups):
        members = [j for j, g in enumerate(groups) if g == group]
        weighted = sum(lengths[j] * scores[j] for j in members) / sum(lengths[j] for j in members)
        expected = scores[i] - (weighted if len(members) > 1 else 0.0)
        assert float(result[i]) == pytest.approx(expected, rel=1e-12)
    by_hand = opo(torch.tensor([1.0, 0.0]), torch.tensor([1, 3]), torch.tensor([0, 0]))
    assert by_hand.tolist() == [0.75, -0.25]
    empty = opo(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([0, 0]))
    assert empty.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_whitens_discounted_rewards_to_go(holes: bool, gamma: float) -> None:
    rewards, _, mask = ragged(7, holes=holes)
    to_go: list[float] = []
    for row in range(len(LENGTHS)):
        r = [float(rewards[row, t]) for t in range(WIDTH) if mask[row, t]]
        to_go += [sum(gamma ** (u - t) * r[u] for u in range(t, len(r))) for t in range(len(r))]
    mean, variance = statistics.fmean(to_go), statistics.variance(to_go)
    result = reinforce_plus_plus(rewards, mask, gamma=gamma)
    expected = [(x - mean) / math.sqrt(variance + 1e-8) for x in to_go]
    assert counted(result, mask) == pytest.approx(expected, rel=1e-9)
    assert (result[~mask] == 0).all()


def test_reinforce_plus_plus_baseline_whitens_scores_around_the_prompts_mean() -> None:
    _, _, mask = ragged(8)
    scores, groups = [1.0, 0.0, 3.0, 1.0, 7.0, -2.0], [0, 0, 1, 1, 2, 2]
    centred = [0.5, -0.5, 1.0, -1.0, 4.5, -4.5]
    each = [c for c, length in zip(centred, LENGTHS, strict=True) for _ in range(length)]
    mean, std = statistics.fmean(each), math.sqrt(statistics.variance(each) + 1e-8)
    result = reinforce_plus_plus_baseline(
        torch.tensor(scores, dtype=torch.float64), torch.tensor(groups), mask
    )
    assert counted(result, mask) == pytest.approx([(c - mean) / std for c in each], rel=1e-9)
    assert (result[~mask] == 0).all()


def test_remax_subtracts_the_greedy_score_from_the_reward_to_go() -> None:
    rewards, _, mask = ragged(9)
    greedy = torch.linspace(-1, 1, len(LENGTHS), dtype=torch.float64)
    result = remax(rewards, greedy, mask)
    for row, length in enumerate(LENGTHS):
        for t in range(length):
            expected = math.fsum(rewards[row, t:length].tolist()) - float(greedy[row])
            assert float(result[row, t]) == pytest.approx(expected, abs=1e-12)
    assert (result[~mask] == 0).all()


OF_TOKENS = {
    "gae": lambda r, v, mask: gae(r, v, mask, gamma=0.9, lam=0.8).advantages,
    "returns": lambda r, v, mask: gae(r, v, mask, gamma=0.9, lam=0.8).returns,
    "reinforce_plus_plus": lambda r, v, mask: reinforce_plus_plus(r, mask, gamma=0.9),
    "remax": lambda r, v, mask: remax(r, torch.zeros(len(r)), mask),
    "baseline": lambda r, v, mask: reinforce_plus_plus_baseline(
        torch.ones(len(r)), torch.zeros(len(r), dtype=torch.long), mask
    ),
}
OF_GROUPS = {
    "grpo": lambda scores, groups: grpo(scores, groups, norm_by_std=True),
    "dr_grpo": lambda scores, groups: grpo(scores, groups, norm_by_std=False),
    "rloo": rloo,
    "opo": lambda scores, groups: opo(scores, torch.arange(1, len(scores) + 1), groups),
}


@pytest.mark.parametrize("name", OF_TOKENS)
def test_where_no_token_counts_every_advantage_is_zero(name: str) -> None:
    rewards, values, mask = ragged(10)
    found = OF_TOKENS[name](rewards, values, torch.zeros_like(mask))
    assert found.shape == mask.shape and (found == 0).all()


@pytest.mark.parametrize("name", ["gae", "returns", "remax"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_that_is_not_finite_spoils_its_own_sequence_alone(name: str, bad: float) -> None:
    rewards, values, mask = ragged(11)
    want = OF_TOKENS[name](rewards, values, mask)
    rewards[3, 4] = values[3, 4] = bad
    found = OF_TOKENS[name](rewards, values, mask)
    others = [0, 1, 2, 4, 5]
    assert torch.equal(found[others], want[others])
    assert not found[3][mask[3]].isfinite().all()  # it is not hidden


@pytest.mark.parametrize("name", OF_GROUPS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_spoils_its_own_group_alone(name: str, bad: float) -> None:
    scores, _, groups = shuffled_groups(3)
    ids = torch.tensor(groups)
    want = OF_GROUPS[name](torch.tensor(scores), ids)
    spoilt = [bad if i == groups.index(8) else score for i, score in enumerate(scores)]
    found = OF_GROUPS[name](torch.tensor(spoilt), ids)
    assert torch.equal(found[ids != 8], want[ids != 8])
    assert not found[ids == 8].isfinite().all()


@pytest.mark.parametrize("name", OF_GROUPS)
@pytest.mark.parametrize("score", [0.1, -3.0, 1e6])
def test_equal_scores_of_a_group_give_no_advantage(name: str, score: float) -> None:
    _, _, groups = shuffled_groups(4)
    ids = torch.tensor(groups)
    found = OF_GROUPS[name](torch.full((len(groups),), score), ids)
    assert found[ids != 11].abs().max() <= 1e-6 * abs(score)  # 11 is a group of one
    assert found[ids == 11].item() == pytest.approx(score, rel=1e-5)


def test_equal_rewards_of_a_whole_batch_are_whitened_to_nothing() -> None:
    _, _, mask = ragged(12)
    last = torch.zeros(mask.shape, dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        last[row, length - 1 : length] = 0.7
    for name in ("reinforce_plus_plus", "baseline"):
        gamma_one = reinforce_plus_plus(last, mask, gamma=1.0)
        found = gamma_one if name == "reinforce_plus_plus" else OF_TOKENS[name](last, None, mask)
        assert found.abs().max() < 1e-6
