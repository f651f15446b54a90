"""KL estimates, the in-reward penalty and the controllers, against numbers worked out by hand."""

import math
from dataclasses import dataclass

import pytest
import torch

from ppo.kl import (
    ESTIMATES,
    AdaptiveKLController,
    FixedKLController,
    StepKLController,
    full_kl,
    kl_estimate,
    make_kl_controller,
    token_rewards,
)


@dataclass(frozen=True)
class Settings:
    type: str
    kl_coef: float = 0.1
    target_kl: float = 0.5
    horizon: int = 100
    min: float = 0.01
    max: float = 0.3


@pytest.mark.parametrize(
    ("kind", "halved", "doubled"),  # policy has half / twice the probability of the reference
    [
        ("kl", -math.log(2), math.log(2)),
        ("k1", -math.log(2), math.log(2)),
        ("abs", math.log(2), math.log(2)),
        ("mse", 0.2402265, 0.2402265),
        ("k2", 0.2402265, 0.2402265),
        ("low_var_kl", 2 - math.log(2) - 1, 0.5 + math.log(2) - 1),
        ("k3", 2 - math.log(2) - 1, 0.5 + math.log(2) - 1),
    ],
)
def test_estimates_by_hand(kind: str, halved: float, doubled: float) -> None:
    policy, ref = torch.tensor([0.1, 0.4]).log(), torch.tensor([0.2, 0.2]).log()
    for name in (kind, kind + "+"):
        values = kl_estimate(policy, ref, name)
        assert values.tolist() == pytest.approx([halved, doubled], abs=1e-6)


def test_k1_and_k3_average_to_the_exact_kl_over_the_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 0.5 * torch.randn(2, 50, generator=generator).double()  # no ratio above the clamp
    policy, ref = logits.log_softmax(-1)
    exact = sum(
        p * (math.log(p) - q) for p, q in zip(policy.exp().tolist(), ref.tolist(), strict=True)
    )
    for kind in ("k1", "k3"):
        expected = (policy.exp() * kl_estimate(policy, ref, kind)).sum()
        assert float(expected) == pytest.approx(exact)


@pytest.mark.parametrize("kind", ESTIMATES)
def test_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind: str) -> None:
    ref = torch.tensor([-1.0, -2.0, -3.0])
    plain, straight = (ref + torch.tensor([0.7, -0.2, 0.0])).requires_grad_(), None
    straight = plain.detach().clone().requires_grad_()
    value = kl_estimate(straight, ref, kind + "+")
    torch.testing.assert_close(value, kl_estimate(plain, ref, kind))
    value.sum().backward()
    assert straight.grad is not None
    torch.testing.assert_close(straight.grad, torch.tensor([0.7, -0.2, 0.0]))


@pytest.mark.parametrize(
    ("kind", "gradient"),
    [("k1", [1.0, 1.0]), ("abs", [1.0, -1.0]), ("k2", [0.5, -0.5]),
     ("k3", [1 - math.exp(-0.5), 1 - math.exp(0.5)])],
)  # fmt: skip
def test_gradients_without_plus(kind: str, gradient: list[float]) -> None:
    logprobs = torch.tensor([0.5, -0.5], requires_grad=True)
    kl_estimate(logprobs, torch.zeros(2), kind).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(gradient)


def test_k3_is_limited_to_ten() -> None:
    values = kl_estimate(torch.tensor([-100.0, 100.0]), torch.zeros(2), "k3")
    assert values.tolist() == [10.0, 10.0]


@pytest.mark.parametrize("kind", [k + s for k in ESTIMATES for s in ("", "+")])
def test_masked_garbage_reaches_no_gradient(kind: str) -> None:
    garbage = torch.tensor([math.nan, math.inf, -math.inf, 0.3])
    logprobs = garbage.repeat(4).requires_grad_()
    ref = garbage.repeat_interleave(4)
    mask = torch.arange(16) == 15
    torch.where(mask, kl_estimate(logprobs, ref, kind), 0.0).sum().backward()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()


def test_full_kl_by_hand_and_in_both_directions() -> None:
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.5, 0.25])
    logits, ref_logits = p.log() + 3.0, q.log() - 1.0  # a constant changes no distribution
    reverse = full_kl(logits[:2], ref_logits[:2])  # of 1/2, 1/2 and 1/3, 2/3
    expected = 0.5 * math.log(0.5 * 3) + 0.5 * math.log(0.5 * 1.5)
    assert float(reverse) == pytest.approx(expected, rel=1e-6)
    forward = full_kl(ref_logits[:2], logits[:2])
    expected = math.log(2 / 3) / 3 + 2 / 3 * math.log(4 / 3)
    assert float(forward) == pytest.approx(expected, rel=1e-6)
    logits = torch.tensor([[0.3, -1.0, 2.0]], requires_grad=True)
    full_kl(logits, logits.detach()).sum().backward()
    assert logits.grad is not None and logits.grad.abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["k4", "full", "", "+"])
def test_an_unknown_kind_is_refused_with_the_known_ones(kind: str) -> None:
    with pytest.raises(ValueError, match="low_var_kl"):
        kl_estimate(torch.zeros(1), torch.zeros(1), kind)


def test_rewards_carry_the_score_at_the_last_token_and_the_penalty_at_every_one() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    kl = torch.tensor([[0.1, 0.2, 9.0, math.nan], [0.0, 1.0, 0.0, -1.0], [math.nan] * 4])
    scores = torch.tensor([1.0, -2.0, math.nan])
    rewards = token_rewards(scores, kl, mask, kl_coef=0.5)
    expected = [[-0.05, 0.9, 0, 0], [0, -0.5, 0, -1.5], [0, 0, 0, 0]]
    torch.testing.assert_close(rewards, torch.tensor(expected))
    plain = token_rewards(scores, None, mask, kl_coef=0.5)
    assert plain.tolist() == [[0, 1, 0, 0], [0, 0, 0, -2], [0, 0, 0, 0]]


def test_the_fixed_controller_never_moves() -> None:
    controller = make_kl_controller(Settings("fixed"))
    for kl in (0.0, 10.0, math.nan):
        controller.update(kl, 1000)
    assert type(controller) is FixedKLController
    assert controller.value == 0.1


def test_the_adaptive_controller_follows_a_sequence_worked_out_by_hand() -> None:
    controller = make_kl_controller(Settings("adaptive"))
    assert type(controller) is AdaptiveKLController
    expected = [
        (0.55, 10, 0.101),  # error +0.1: x (1 + 0.1 * 10 / 100)
        (5.0, 50, 0.1111),  # error clipped to +0.2: x 1.1
        (0.5, 50, 0.1111),  # on target
        (math.nan, 50, 0.1111),  # not finite: stays
        (-1.0, 50, 0.09999),  # error clipped to -0.2: x 0.9
        (5.0, 5000, 0.3),  # x 11, kept at the maximum
        (0.0, 500, 0.01),  # x 0, kept at the minimum
    ]
    for kl, num_seqs, value in expected:
        controller.update(kl, num_seqs)
        assert controller.value == pytest.approx(value)


def test_the_step_controller_follows_a_sequence_worked_out_by_hand() -> None:
    controller = make_kl_controller(Settings("step"))
    assert type(controller) is StepKLController
    expected = [
        (0.76, 0.15),  # above 0.75
        (0.75, 0.15),  # just inside
        (0.34, 0.15),  # above 0.5 / 1.5 = 0.333
        (0.33, 0.1),
        (math.nan, 0.1),
        (9.0, 0.15),
        (9.0, 0.225),
        (9.0, 0.3),  # 0.3375, kept at the maximum
        (0.0, 0.2),
    ]
    for kl, value in expected:
        controller.update(kl, 8)
        assert controller.value == pytest.approx(value)


@pytest.mark.parametrize("kind", ["fixed", "adaptive", "step"])
def test_a_controller_goes_on_from_its_saved_state(kind: str) -> None:
    first, second = make_kl_controller(Settings(kind)), make_kl_controller(Settings(kind))
    first.update(0.9, 20)
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(0.1, 20)
    assert first.value == second.value


@pytest.mark.parametrize("kind", ["fixed", "adaptive", "step"])
def test_a_controller_begins_anew_with_a_coefficient_that_was_changed(kind: str) -> None:
    first, second = make_kl_controller(Settings(kind)), make_kl_controller(Settings(kind, 0.02))
    first.update(0.9, 20)
    second.load_state_dict(first.state_dict())
    assert second.value == 0.02
    third = make_kl_controller(Settings(kind))
    third.load_state_dict({"value": 0.05})  # of a version that did not save where it began
    assert third.value == (0.1 if kind == "fixed" else 0.05)


@pytest.mark.parametrize("kind", ["fixed", "adaptive", "step"])
@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_a_kl_that_is_not_finite_moves_no_coefficient(kind: str, kl: float) -> None:
    controller = make_kl_controller(Settings(kind))
    controller.update(kl, 50)
    assert controller.value == 0.1


@pytest.mark.parametrize(
    ("kind", "expected"),  # of log ratios 60 and -60, by hand; k3 ends at 10 on both sides
    [("k1", [60, -60]), ("abs", [60, 60]), ("k2", [1800, 1800]), ("k3", [10, 10])],
)
def test_log_ratios_beyond_twenty_give_finite_estimates_and_gradients(kind, expected) -> None:
    for name in (kind, kind + "+"):
        logprobs = torch.tensor([60.0, -60.0], requires_grad=True)
        values = kl_estimate(logprobs, torch.zeros(2), name)
        assert values.tolist() == expected
        values.sum().backward()
        assert logprobs.grad is not None and logprobs.grad.isfinite().all()


@pytest.mark.parametrize("kind", ESTIMATES)
def test_a_counted_nan_is_not_hidden(kind: str) -> None:
    values = kl_estimate(torch.tensor([math.nan, -1.0]), torch.tensor([-1.0, -1.0]), kind)
    assert values.isnan().tolist() == [True, False]
