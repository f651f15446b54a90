"""The sampling noise against published vectors, exact probabilities and plain numpy."""

import numpy as np
import pytest
import torch

from ppo.engines.embedded.sampling import philox, sample, uniforms

LOGITS = torch.tensor([[1.5, -0.5, 0.3, 2.0, -3.0, 0.9, 0.0, -1.2]])


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """Standardised chi-square statistic: near a standard normal when `probs` is right."""
    expected = counts.sum() * probs
    freedom = len(probs) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def draw(logits: torch.Tensor, number: int, **options) -> np.ndarray:
    """Counts of `number` tokens drawn from one row of logits."""
    noise = uniforms(torch.arange(number), torch.tensor(3), seed=11, step=2)
    tokens = sample(logits.expand(number, -1), noise, **options).tokens
    return np.bincount(tokens.numpy(), minlength=logits.shape[-1])


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known-answer vectors of Random123
        ([0] * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([2**32 - 1] * 4, (2**32 - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, expected):
    a, b, c, d = (torch.tensor([word]) for word in counter)
    words = philox((a, b, c, d), key)
    assert " ".join(f"{word.item():08x}" for word in words) == expected


def test_noise_is_uniform_within_rows_and_across_them():
    noise = uniforms(torch.arange(500)[:, None], torch.arange(200), seed=7, step=0)  # [500, 200]
    assert noise.dtype == torch.float64 and noise.min() > 0 and noise.max() < 1
    counts = np.bincount((noise.flatten() * 64).long().numpy(), minlength=64)
    assert abs(chi_square(counts, np.full(64, 1 / 64))) < 4
    for neighbours in (noise[:, 1:] - 0.5, noise[1:] - 0.5):
        ahead = (noise[:, :-1] if neighbours.shape[0] == 500 else noise[:-1]) - 0.5
        correlation = (ahead * neighbours).mean() / noise.var()
        assert abs(correlation) < 4 / np.sqrt(neighbours.numel())


def test_noise_changes_with_every_part_of_its_counter_and_with_nothing_else():
    uid, position = torch.tensor([5]), torch.tensor([9])
    base = uniforms(uid, position, seed=1, step=2).item()
    others = [
        uniforms(uid, position, seed=2, step=2),
        uniforms(uid, position, seed=1 + 2**40, step=2),
        uniforms(uid, position, seed=1, step=3),
        uniforms(uid + 1, position, seed=1, step=2),
        uniforms(uid + 2**40, position, seed=1, step=2),
        uniforms(uid, position + 1, seed=1, step=2),
    ]
    assert len({base, *(other.item() for other in others)}) == 7
    grid = uniforms(torch.arange(8)[:, None], torch.arange(12), seed=1, step=2)
    assert grid[5, 9].item() == base


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_samples_follow_the_softmax_at_the_temperature(temperature):
    counts = draw(LOGITS, 40_000, temperature=temperature)
    weights = np.exp(LOGITS[0].double().numpy() / temperature)
    assert abs(chi_square(counts, weights / weights.sum())) < 4


def test_samples_follow_the_softmax_over_a_vocabulary_of_many_blocks():
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0))
    counts = draw(logits, 60_000, temperature=1.0)
    weights = np.exp(logits[0].double().numpy())
    assert abs(chi_square(counts, weights / weights.sum())) < 4


def reference_filter(z: np.ndarray, *, top_p: float, top_k: int) -> np.ndarray:
    """Probabilities after keeping tokens one by one from the most likely down."""
    probs = np.exp(z - z.max())
    probs /= probs.sum()
    kept, mass = np.zeros_like(probs), 0.0
    for rank, token in enumerate(sorted(range(len(z)), key=lambda t: -z[t])):
        if mass >= top_p or (top_k > 0 and rank >= top_k):
            break
        kept[token] = probs[token]
        mass += probs[token]
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("top_p", "top_k"), [(0.7, -1), (0.2, -1), (1.0, 3), (1.0, 1), (0.95, 4), (0.6, 100)]
)
def test_filtered_samples_follow_the_renormalised_reference(top_p, top_k):
    counts = draw(LOGITS, 20_000, temperature=0.8, top_p=top_p, top_k=top_k)
    probs = reference_filter(LOGITS[0].double().numpy() / 0.8, top_p=top_p, top_k=top_k)
    assert (counts[probs == 0] == 0).all()
    if (probs > 0).sum() > 1:
        assert abs(chi_square(counts[probs > 0], probs[probs > 0])) < 4


def test_every_noise_value_picks_the_token_of_a_plain_cumulative_sum():
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(64, 700, generator=generator)
    noise = torch.rand(64, generator=generator, dtype=torch.float64)
    noise[0], noise[1] = 2.0**-49, 1 - 2.0**-49
    tokens = sample(logits, noise, temperature=1.3, top_p=0.9, top_k=50).tokens
    for row in range(64):
        probs = reference_filter(logits[row].double().numpy() / 1.3, top_p=0.9, top_k=50)
        assert tokens[row] == np.searchsorted(np.cumsum(probs), noise[row].item(), side="right")


def test_tokens_without_probability_are_never_drawn_at_the_ends_of_the_noise():
    logits = torch.full((4, 600), -torch.inf)
    logits[:, 300] = 0.0
    logits[2:, 599] = -20.0
    noise = torch.tensor([2.0**-49, 1 - 2.0**-49] * 2, dtype=torch.float64)
    tokens = sample(logits, noise, temperature=1.0).tokens
    assert tokens.tolist() == [300, 300, 300, 599]


def test_logprobs_are_those_of_the_unfiltered_distribution_in_float32():
    logits = torch.randn(16, 90, generator=torch.Generator().manual_seed(2)).bfloat16()
    noise = uniforms(torch.arange(16), torch.tensor(0), seed=0, step=0)
    tokens, logprobs = sample(logits, noise, temperature=0.5, top_p=0.5, top_k=7)
    z = logits.double().numpy() / 0.5
    expected = z - np.log(np.exp(z).sum(-1, keepdims=True))
    assert logprobs.dtype == torch.float32
    np.testing.assert_allclose(logprobs, expected[np.arange(16), tokens], rtol=0, atol=2e-6)


def test_temperature_zero_takes_the_most_likely_token_and_its_logprob_at_temperature_one():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, -1.0]])
    noise = torch.tensor([0.99, 0.99], dtype=torch.float64)
    tokens, logprobs = sample(logits, noise, temperature=0, top_p=0.1, top_k=1)
    assert tokens.tolist() == [1, 0]
    np.testing.assert_allclose(
        logprobs,
        [3 - np.log(1 + np.e**3 + np.e), 2 - np.log(2 * np.e**2 + np.e**-1)],
        rtol=1e-6,
    )


def test_a_row_gets_the_same_token_alone_and_in_a_batch():
    logits = 2 * torch.randn(32, 5000, generator=torch.Generator().manual_seed(3))
    noise = uniforms(torch.arange(32), torch.tensor(1), seed=5, step=4)
    together = sample(logits, noise, temperature=1.0, top_p=0.8)
    for row in (0, 13, 31):
        alone = sample(logits[row : row + 1], noise[row : row + 1], temperature=1.0, top_p=0.8)
        assert alone.tokens.item() == together.tokens[row]
