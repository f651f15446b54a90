"""Chunked log-probs and entropy against log_softmax on full float64 logits."""

import math

import pytest
import torch
from torch import Tensor

from ppo.kl import full_kl
from ppo.logprobs import LogitTransform, Reference, blocks, token_logprobs
from ppo.logprobs.blocks import MAX_BLOCK_ROWS
from tests.peak_memory import PeakTracker


def problem(num_tokens: int, vocab: int, hidden: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(num_tokens * 1000 + vocab)
    h = torch.randn(num_tokens, hidden, dtype=torch.float64, generator=g, requires_grad=True)
    w = torch.randn(vocab, hidden, dtype=torch.float64, generator=g, requires_grad=True)
    return h, w, torch.randint(0, vocab, (num_tokens,), generator=g)


def reference(
    h: Tensor, w: Tensor, labels: Tensor, temperature: float, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    z = h @ w.T * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    dist = torch.distributions.Categorical(logits=z / temperature)
    return dist.log_prob(labels), dist.entropy()


def assert_same_values_and_gradients(
    h: Tensor, w: Tensor, labels: Tensor, *, temperature=1.0, scale=1.0, softcap=None, **kwargs
) -> None:
    g = torch.Generator().manual_seed(7)
    up = torch.randn(2, len(labels), dtype=torch.float64, generator=g)
    want = reference(h, w, labels, temperature, scale, softcap)
    want_grads = torch.autograd.grad((want[0] * up[0] + want[1] * up[1]).sum(), (h, w))
    transform = LogitTransform(scale, softcap)
    got = token_logprobs(
        h, w, labels, temperature=temperature, with_entropy=True, transform=transform, **kwargs
    )
    assert got.entropy is not None
    grads = torch.autograd.grad((got.logprobs * up[0] + got.entropy * up[1]).sum(), (h, w))
    for a, b in zip((got.logprobs, got.entropy, *grads), (*want, *want_grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)

    alone = token_logprobs(h, w, labels, temperature=temperature, transform=transform, **kwargs)
    assert alone.entropy is None
    grads = torch.autograd.grad((alone.logprobs * up[0]).sum(), (h, w))
    want_grads = torch.autograd.grad(
        (reference(h, w, labels, temperature, scale, softcap)[0] * up[0]).sum(), (h, w)
    )
    for a, b in zip((alone.logprobs, *grads), (want[0], *want_grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 300])
def test_any_vocabulary_equals_full_softmax_at_the_edges_of_blocks(vocab):
    h, w, labels = problem(7, vocab)
    edges = torch.tensor([0, 127, 128, 255, 256, vocab - 1]).clamp(max=vocab - 1)
    labels[: len(edges)] = edges
    assert_same_values_and_gradients(h, w, labels, block_elements=1)
    assert_same_values_and_gradients(h, w, labels)


def test_temperature_scale_and_softcap_are_inside_the_log_softmax():
    h, w, labels = problem(9, 200)
    assert_same_values_and_gradients(h, w, labels, temperature=0.7, block_elements=1)
    assert_same_values_and_gradients(h, w, labels, temperature=1.3, scale=0.5, block_elements=1)
    assert_same_values_and_gradients(
        h, w, labels, temperature=0.7, scale=1.5, softcap=2.0, block_elements=1
    )


@pytest.mark.parametrize("is_forward", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_kl_over_all_ids_is_that_of_whole_logits_in_value_and_gradient(
    monkeypatch, is_forward, with_entropy
):
    """Heads of other sizes, scales and softcaps; blocks and slices with remainders; ids beyond."""
    monkeypatch.setattr(blocks, "MAX_BLOCK_ROWS", 3)
    num_ids, temperature = 290, 0.7
    own, other = LogitTransform(0.5, 3.0), LogitTransform(1.3)
    h, w, labels = problem(7, 300)
    ref_h, ref_w, _ = problem(7, 333, hidden=9)
    labels = labels.clamp(max=num_ids - 1)
    z = own(h @ w.T)[:, :num_ids] / temperature
    ref_z = other(ref_h @ ref_w.T)[:, :num_ids].detach() / temperature
    pair = (ref_z, z) if is_forward else (z, ref_z)
    want = full_kl(*pair)
    chosen = z.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    entropy = torch.distributions.Categorical(logits=z).entropy()
    got = token_logprobs(
        h,
        w,
        labels,
        temperature=temperature,
        with_entropy=with_entropy,
        transform=own,
        num_ids=num_ids,
        reference=Reference(
            hidden=ref_h.detach(), weight=ref_w.detach(), transform=other, is_forward=is_forward
        ),
        block_elements=2 * 3 * 128,
    )
    assert got.kl is not None and (want > 0).all()
    torch.testing.assert_close(got.kl, want, rtol=1e-10, atol=1e-10)
    up = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    total = (got.kl * up[0] + got.logprobs * up[1]).sum()
    want_total = (want * up[0] + chosen * up[1]).sum()
    if with_entropy:
        assert got.entropy is not None
        total, want_total = (
            total + (got.entropy * up[2]).sum(),
            want_total + (entropy * up[2]).sum(),
        )
    for a, b in zip(
        torch.autograd.grad(total, (h, w)), torch.autograd.grad(want_total, (h, w)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_model_has_no_kl_with_itself_and_no_gradient_of_it():
    h, w, labels = problem(5, 200)
    itself = Reference(
        hidden=h.detach(), weight=w.detach(), transform=LogitTransform(), is_forward=False
    )
    found = token_logprobs(h.float(), w.float(), labels, reference=itself).kl
    assert found is not None and found.abs().max() < 1e-5
    grads = torch.autograd.grad(found.sum(), (h, w))
    assert max(g.abs().max().item() for g in grads) < 1e-5


def test_a_reference_with_fewer_ids_or_tokens_is_refused():
    h, w, labels = problem(5, 200)
    for tokens, ids in ((4, 200), (5, 199)):
        other, head, _ = problem(tokens, ids)
        reference = Reference(
            hidden=other.detach(),
            weight=head.detach(),
            transform=LogitTransform(),
            is_forward=False,
        )
        with pytest.raises(ValueError, match="the reference has"):
            token_logprobs(h, w, labels, reference=reference)


def test_rows_beyond_one_slice_add_their_gradients_to_the_weight():
    h, w, labels = problem(MAX_BLOCK_ROWS + 3, 3, hidden=2)
    assert_same_values_and_gradients(h, w, labels)


def test_values_known_by_hand():
    # Two logits that differ by ln 3: p = (3/4, 1/4).
    h = torch.tensor([[1.0], [1.0]], dtype=torch.float64)
    w = torch.tensor([[math.log(3)], [0.0]], dtype=torch.float64)
    scores = token_logprobs(h, w, torch.tensor([0, 1]), with_entropy=True)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert scores.logprobs.tolist() == pytest.approx([math.log(0.75), math.log(0.25)])
    assert scores.entropy is not None and scores.entropy.tolist() == pytest.approx([entropy] * 2)


def test_no_scored_token_gives_zero_gradients_through_a_connected_graph():
    h, w, labels = problem(0, 300)
    scores = token_logprobs(h, w, labels, with_entropy=True, block_elements=1)
    assert scores.logprobs.shape == (0,)
    (scores.logprobs.sum() * 0.0).backward()
    assert h.grad is not None and h.grad.shape == (0, 5)
    assert w.grad is not None and w.grad.shape == (300, 5) and not w.grad.any()


def test_gradients_pass_torch_gradcheck():
    h, w, labels = problem(4, 150, hidden=3)

    def scores(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = token_logprobs(h, w, labels, temperature=0.9, with_entropy=True, block_elements=1)
        assert s.entropy is not None
        return s.logprobs, s.entropy

    assert torch.autograd.gradcheck(scores, (h, w), fast_mode=True)


def test_a_frozen_head_or_frozen_hidden_states_get_no_gradient():
    h, w, labels = problem(4, 150)
    token_logprobs(h, w.detach(), labels).logprobs.sum().backward()
    assert h.grad is not None and w.grad is None
    h.grad = None
    token_logprobs(h.detach(), w, labels).logprobs.sum().backward()
    assert h.grad is None and w.grad is not None


def test_bfloat16_keeps_float32_statistics_and_bfloat16_gradients():
    h, w, labels = problem(64, 1000, hidden=16)
    h16, w16 = (t.detach().bfloat16().requires_grad_() for t in (h, w))
    scores = token_logprobs(h16, w16, labels, with_entropy=True)
    want, _ = reference(h16.detach().double(), w16.detach().double(), labels, 1.0, 1.0, None)
    assert scores.logprobs.dtype == torch.float32
    torch.testing.assert_close(scores.logprobs.double(), want, rtol=2e-2, atol=5e-2)
    scores.logprobs.sum().backward()
    assert h16.grad is not None and h16.grad.dtype == torch.bfloat16
    assert w16.grad is not None and w16.grad.dtype == torch.bfloat16


def test_slices_of_rows_add_their_gradients_to_a_bfloat16_head_as_exactly_as_one(monkeypatch):
    """Sums of 512 slices that were rounded to 8 bits each time would be off by percents."""
    h, w, labels = problem(4096, 40, hidden=8)
    rounded = [t.detach().bfloat16() for t in (h, w)]
    h, w = (t.double().requires_grad_() for t in rounded)
    [want] = torch.autograd.grad(reference(h, w, labels, 1.0, 1.0, None)[0].sum(), w)

    def error() -> float:
        weight = rounded[1].clone().requires_grad_()
        token_logprobs(rounded[0], weight, labels).logprobs.sum().backward()
        assert weight.grad is not None
        return ((weight.grad.double() - want).norm() / want.norm()).item()

    as_one = error()
    monkeypatch.setattr(blocks, "MAX_BLOCK_ROWS", 8)
    assert error() < 1.5 * as_one < 0.01


def test_large_logits_do_not_overflow():
    h = torch.tensor([[1.0], [-1.0]])
    w = torch.tensor([[1e4], [0.0], [-1e4]])
    scores = token_logprobs(h, w, torch.tensor([0, 0]), with_entropy=True)
    assert scores.logprobs.tolist() == [0.0, -2e4]
    assert scores.entropy is not None and scores.entropy.tolist() == [0.0, 0.0]


def test_shapes_and_temperature_are_checked_with_values_in_the_message():
    h, w, labels = problem(4, 10)
    with pytest.raises(ValueError, match=r"\[4, 5\].*\[10, 4\]"):
        token_logprobs(h, w[:, :4], labels)
    with pytest.raises(ValueError, match=r"labels \[3\]"):
        token_logprobs(h, w, labels[:3])
    with pytest.raises(ValueError, match="positive, got 0"):
        token_logprobs(h, w, labels, temperature=0)


def test_peak_memory_is_a_small_part_of_that_of_full_logits():
    h = torch.randn(512, 8, requires_grad=True)
    w = torch.randn(20_000, 8, requires_grad=True)
    labels = torch.randint(0, 20_000, (512,))
    with PeakTracker(torch.device("cpu")) as tracker:
        token_logprobs(h, w, labels).logprobs.sum().backward()
    chunked = tracker.peak_bytes
    with PeakTracker(torch.device("cpu")) as tracker:
        logprobs = torch.log_softmax(h @ w.T, -1).gather(1, labels[:, None])
        logprobs.sum().backward()
    assert chunked <= tracker.peak_bytes / 4


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 300, MAX_BLOCK_ROWS + 7])
def test_half_precision_on_a_gpu_is_as_exact_as_its_inputs(num_tokens):
    h, w, labels = problem(num_tokens, 500, hidden=64)
    rounded = [(t.detach() / 4).bfloat16() for t in (h, w)]
    h, w = (t.double().requires_grad_() for t in rounded)
    want = reference(h, w, labels, 0.7, 1.0, None)
    want_grads = torch.autograd.grad((want[0] + want[1]).sum(), (h, w))
    hidden, weight = (t.cuda().requires_grad_() for t in rounded)
    got = token_logprobs(
        hidden, weight, labels.cuda(), temperature=0.7, with_entropy=True, block_elements=1
    )
    assert got.entropy is not None and got.logprobs.dtype == torch.float32
    grads = torch.autograd.grad((got.logprobs + got.entropy).sum(), (hidden, weight))
    for a, b in zip((got.logprobs, got.entropy), want, strict=True):
        torch.testing.assert_close(a.double().cpu(), b, rtol=1e-5, atol=1e-5)
    for a, b in zip(grads, want_grads, strict=True):
        assert (a.double().cpu() - b).norm() <= 1e-2 * b.norm()


@pytest.mark.gpu
def test_no_tokens_give_zero_gradients_on_a_gpu():
    hidden = torch.ones(0, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.ones(500, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    labels = torch.zeros(0, dtype=torch.int64, device="cuda")
    token_logprobs(hidden, weight, labels).logprobs.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


def test_rows_of_the_head_beyond_the_ids_have_no_probability_and_no_gradient():
    h, w, labels = problem(9, 300)
    labels %= 200
    up = torch.linspace(-1, 1, len(labels), dtype=torch.float64)
    want = reference(h, w[:200], labels, 0.7, 1.0, None)
    got = token_logprobs(
        h, w, labels, temperature=0.7, with_entropy=True, num_ids=200, block_elements=9 * 128
    )
    assert got.entropy is not None
    torch.testing.assert_close(torch.stack(want), torch.stack((got.logprobs, got.entropy)))
    want_grads = torch.autograd.grad((want[0] * up + want[1]).sum(), (h, w))
    grads = torch.autograd.grad((got.logprobs * up + got.entropy).sum(), (h, w))
    for a, b in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert not grads[1][200:].any()
