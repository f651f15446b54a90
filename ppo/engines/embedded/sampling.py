"""Sampling that depends on nothing but the logits and a counter.

Owns the noise, one uniform number per (seed, step, uid, position), and the choice of a token from
it. Pure: no state, no collective, no device of its own; the same on CPU and CUDA, in any batch
and on any number of ranks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Multipliers and key increments of Philox4x32-10 (Salmon et al., "Parallel random numbers: as
# easy as 1, 2, 3", SC'11).
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = 0xFFFFFFFF

# Vocabulary entries per block of the two-level search in `_inverse_cdf`.
_BLOCK = 256
# Largest share of a block's mass that a target may have: keeps rounding inside the block.
_BELOW_ONE = 1 - 2**-40


class Sampled(NamedTuple):
    """Chosen tokens [R] int64 and their log-probs [R] float32."""

    tokens: Tensor
    logprobs: Tensor


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Philox4x32-10: four 32-bit words from a 128-bit counter and a 64-bit key.

    Words are int64 tensors of one shape with values in [0, 2^32). Products wrap modulo 2^64, so
    the low and high halves are exact.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & _LOW, (product1 >> 32) & _LOW
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _LOW, high0 ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return [c0, c1, c2, c3]


def uniforms(uids: Tensor, positions: Tensor, *, seed: int, step: int) -> Tensor:
    """Noise of the tokens at `positions` (response token index) of the samples `uids`.

    uids and positions are int64 and broadcast against each other. Returns float64 in (0, 1) with
    48 random bits.
    """
    uids, positions = torch.broadcast_tensors(uids, positions)
    counter = (
        positions & _LOW,
        uids & _LOW,
        (uids >> 32) & _LOW,
        torch.full_like(uids, step & _LOW),
    )
    high, low, _, _ = philox(counter, (seed & _LOW, (seed >> 32) & _LOW))
    return ((high * 2**16 + (low >> 16)).double() + 0.5) * 2.0**-48


def sample(
    logits: Tensor, noise: Tensor, *, temperature: float, top_p: float = 1.0, top_k: int = -1
) -> Sampled:
    """Draws one token per row by inverse CDF over the filtered distribution.

    logits [R, V] of any float type, noise [R] float64 in (0, 1). The log-probs are those of
    log softmax(z / T) before filtering, float32; temperature 0 is greedy with T = 1. top_k and
    top_p both look at the unfiltered distribution, as SGLang does; tokens that tie with the last
    one kept are kept too.
    """
    z = logits.float()
    if temperature == 0:
        tokens = z.argmax(-1)
    else:
        z = z / temperature
    normaliser = z.logsumexp(-1, keepdim=True)  # [R, 1]
    if temperature != 0:
        keep = _kept(z, normaliser, top_p=top_p, top_k=top_k)
        tokens = _inverse_cdf(z, normaliser, keep, noise)
    logprobs = z.gather(-1, tokens[:, None]) - normaliser  # [R, 1]
    return Sampled(tokens, logprobs.squeeze(-1))


def _kept(z: Tensor, normaliser: Tensor, *, top_p: float, top_k: int) -> Tensor | None:
    """Mask [R, V] of the tokens that top_k and top_p leave; None when both are off."""
    top_k = top_k if 0 < top_k < z.shape[-1] else -1
    if top_k == -1 and top_p >= 1:
        return None
    # Only top_p alone needs the whole order.
    ranked = z.topk(top_k).values if top_k != -1 else z.sort(descending=True).values  # [R, k or V]
    if top_p >= 1:
        return z >= ranked[:, -1:]
    probs = (ranked - normaliser).exp().double()
    mass_before = probs.cumsum(-1) - probs
    last = (mass_before < top_p).sum(-1, keepdim=True) - 1  # [R, 1]
    return z >= ranked.gather(-1, last)


def _inverse_cdf(z: Tensor, normaliser: Tensor, keep: Tensor | None, noise: Tensor) -> Tensor:
    """Tokens [R]: the first whose cumulative probability exceeds noise x the kept mass.

    Two levels, block sums and then one block per row, so that no cumulative sum over the whole
    vocabulary is made. Float64 beyond the block sums: a change of the logits in their last bits
    moves a token only when the noise lies that close to a border.
    """
    rows, vocab = z.shape
    blocks = -(-vocab // _BLOCK)
    probs = z.new_zeros(rows, blocks * _BLOCK)
    torch.exp(z - normaliser, out=probs[:, :vocab])
    if keep is not None:
        probs[:, :vocab].masked_fill_(~keep, 0.0)
    probs = probs.view(rows, blocks, _BLOCK)

    ends = probs.sum(-1).double().cumsum(-1)  # [R, blocks]
    target = noise[:, None] * ends[:, -1:]  # [R, 1]
    block = _first_above(ends, target)  # [R, 1]
    start = ends.gather(-1, (block - 1).clamp(min=0)).where(block > 0, 0.0)
    inside = probs.gather(1, block[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1)  # [R, _BLOCK]
    inside = inside.double().cumsum(-1)
    offset = _first_above(inside, torch.minimum(target - start, inside[:, -1:] * _BELOW_ONE))
    return (block * _BLOCK + offset).squeeze(-1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Index [R, 1] of the first entry of the ascending rows [R, n] that exceeds target [R, 1]."""
    return (cumulative <= target).sum(-1, keepdim=True)
