"""Losses against plain Python on single numbers, and numbers worked out by hand."""

import math
from typing import get_args

import pytest
import torch

from ppo.losses import (
    AggregationMode,
    aggregate,
    policy_loss,
    rollout_probs_diff,
    token_weights,
    value_loss,
)

MODES: tuple[AggregationMode, ...] = get_args(AggregationMode)
NAN = math.nan
LOSS = torch.tensor([[1.0, 2.0, 3.0, NAN], [5.0, math.inf, NAN, NAN], [NAN] * 4])
MASK = torch.tensor([[True, True, True, False], [True, False, False, False], [False] * 4])


@pytest.mark.parametrize(
    ("mode", "scale", "expected"),
    [
        ("token-mean", None, 11 / 4),
        ("token-sum", None, 11.0),
        ("seq-mean-token-sum", None, (6 + 5) / 2),
        ("seq-mean-token-mean", None, (2 + 5) / 2),
        ("seq-mean-token-sum-norm", None, (6 + 5) / 2 / 4),
        ("seq-mean-token-sum-norm", 10.0, (6 + 5) / 2 / 10),
    ],
)
@pytest.mark.parametrize("dp_size", [1, 3])
def test_aggregation_by_hand(mode, scale, expected: float, dp_size: int) -> None:
    value = aggregate(LOSS, MASK, mode=mode, num_tokens=4, num_seqs=2, dp_size=dp_size, scale=scale)
    assert float(value) == pytest.approx(dp_size * expected)


@pytest.mark.parametrize("mode", MODES)
def test_parts_of_a_batch_sum_to_the_whole(mode) -> None:
    generator = torch.Generator().manual_seed(0)
    loss = torch.randn(5, 6, generator=generator)
    mask = torch.rand(5, 6, generator=generator) < 0.6
    num_tokens, num_seqs = int(mask.sum()), int(mask.any(-1).sum())
    whole = aggregate(loss, mask, mode=mode, num_tokens=num_tokens, num_seqs=num_seqs)
    sizes = {"num_tokens": num_tokens, "num_seqs": num_seqs}
    parts = [
        aggregate(loss[rows], mask[rows], mode=mode, **sizes) for rows in ([0], [1, 2], [], [3, 4])
    ]
    torch.testing.assert_close(torch.stack(parts).sum(), whole)
    flat = token_weights(mask, mode=mode, **sizes)[mask]  # packed: only counted tokens
    torch.testing.assert_close((flat * loss[mask]).sum(), whole)


def test_aggregating_nothing_gives_zero() -> None:
    for mode in MODES:
        none = torch.zeros_like(MASK)
        assert float(aggregate(LOSS, none, mode=mode, num_tokens=0, num_seqs=0)) == 0.0


def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="token-mean"):
        token_weights(MASK, mode="mean", num_tokens=1, num_seqs=1)  # pyright: ignore


def surrogate(ratio: float, advantage: float, low: float, high: float, c: float) -> float:
    """The objective as a person would draw it, piece by piece."""
    if advantage >= 0:
        return -advantage * min(ratio, 1 + high)
    return -advantage * min(max(ratio, 1 - low), c)


def test_policy_loss_equals_its_pieces_on_a_grid() -> None:
    ratios = [0.1, 0.79, 0.81, 1.0, 1.27, 1.29, 2.9, 3.1, 50.0]
    for advantage in (-2.0, -0.5, 0.0, 0.5, 2.0):
        for ratio in ratios:
            old = torch.tensor([-1.3], dtype=torch.float64)
            new = old + math.log(ratio)
            result = policy_loss(
                new,
                old,
                torch.tensor([advantage]).double(),
                clip_low=0.2,
                clip_high=0.28,
                clip_c=3.0,
            )
            assert float(result.ratio) == pytest.approx(ratio)
            expected = surrogate(ratio, advantage, 0.2, 0.28, 3.0)
            assert float(result.loss) == pytest.approx(expected, abs=1e-12)
            clipped = (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8)
            assert bool(result.clipped) == clipped
            assert bool(result.clipped_low) == (advantage < 0 and ratio > 3.0)


def test_equal_logprobs_give_ratio_one_and_the_policy_gradient() -> None:
    logprobs = torch.tensor([-0.3, -2.0, -40.0], requires_grad=True)
    advantages = torch.tensor([1.5, -0.5, 0.0])
    result = policy_loss(
        logprobs, logprobs.detach(), advantages, clip_low=0.2, clip_high=0.2, clip_c=3.0
    )
    result.loss.sum().backward()
    assert result.ratio.tolist() == [1.0, 1.0, 1.0]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.5, 0.5, 0.0]


def test_clipped_tokens_have_no_gradient() -> None:
    logprobs = torch.log(torch.tensor([1.5, 0.5, 4.0])).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, -1.0])
    result = policy_loss(
        logprobs, torch.zeros(3), advantages, clip_low=0.2, clip_high=0.2, clip_c=3.0
    )
    result.loss.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [0.0, 0.0, 0.0]
    assert result.loss.tolist() == pytest.approx([-1.2, 0.8, 3.0])


def test_a_difference_of_logprobs_is_limited_to_20() -> None:
    far = policy_loss(
        torch.tensor([0.0, -500.0]),
        torch.tensor([-500.0, 0.0]),
        torch.tensor([-1.0, 1.0]),
        clip_low=0.2,
        clip_high=0.2,
        clip_c=math.inf,
    )
    assert far.ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20)])
    assert float(far.loss[0]) == pytest.approx(math.exp(20))  # no dual clip


def test_garbage_outside_the_mask_reaches_no_gradient() -> None:
    garbage = [NAN, math.inf, -math.inf, 1.0]
    old, advantages = torch.zeros(1, 64), torch.zeros(1, 64)
    logprobs = torch.zeros(1, 64)
    for i in range(64):
        logprobs[0, i] = garbage[i % 4]
        old[0, i] = garbage[i // 4 % 4]
        advantages[0, i] = garbage[i // 16]
    mask = torch.zeros(1, 64, dtype=torch.bool)
    mask[0, -1] = True
    logprobs.requires_grad_()
    policy = policy_loss(logprobs, old, advantages, clip_low=0.2, clip_high=0.2, clip_c=3.0)
    value = value_loss(logprobs, old, advantages, clip=0.5)
    for per_token in (policy.loss, value.loss):
        aggregate(per_token, mask, mode="token-mean", num_tokens=1, num_seqs=1).backward()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()
    assert (logprobs.grad[~mask] == 0).all()


def test_a_counted_nan_is_not_hidden() -> None:
    policy = policy_loss(
        torch.tensor([NAN]), torch.zeros(1), torch.ones(1), clip_low=0.2, clip_high=0.2, clip_c=3.0
    )
    assert policy.loss.isnan().all()
    assert (
        value_loss(torch.tensor([NAN]), torch.zeros(1), torch.ones(1), clip=0.5).loss.isnan().all()
    )


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "clipped", "gradient"),
    [
        (1.0, 0.8, 2.0, 0.5, False, -1.0),  # inside the range: plain regression
        (2.0, 1.0, 3.0, 0.5 * 1.5**2, True, 0.0),  # ran too far towards the target: stopped
        (2.0, 1.0, 0.0, 2.0, False, 2.0),  # far, but away from the target: brought back
        (0.0, 1.0, 0.5, 0.125, False, -0.5),  # clip(0) = 0.5 hits the target; the larger counts
    ],
)
def test_value_loss_by_hand(value, old, target, loss, clipped, gradient) -> None:
    values = torch.tensor([value], requires_grad=True)
    result = value_loss(values, torch.tensor([old]), torch.tensor([target]), clip=0.5)
    result.loss.sum().backward()
    assert result.loss.tolist() == pytest.approx([loss])
    assert result.clipped.tolist() == [clipped]
    assert values.grad is not None and values.grad.tolist() == pytest.approx([gradient])


ROLLOUT = torch.tensor([[0.5, 0.5, 0.5], [0.2, 0.9, 0.4]]).log()
TRAINER = torch.tensor([[0.5, 0.25, 0.9], [0.8, 0.9, 0.4]]).log()
COUNTED = torch.tensor([[True, True, False], [True, True, True]])


def test_rollout_mismatch_by_hand() -> None:
    trainer = TRAINER.masked_fill(~COUNTED, NAN)
    mismatch = rollout_probs_diff(trainer, ROLLOUT, COUNTED)
    assert float(mismatch.mean) == pytest.approx((0 + 0.25 + 0.6 + 0 + 0) / 5, abs=1e-6)
    assert float(mismatch.max) == pytest.approx(0.6, abs=1e-6)
