"""Signs that a policy degenerates, of a batch: pure functions of its tokens and scores.

Owns the formulas. Knows no rank, tokenizer or metric: whoever calls adds up what ranks have found.
Nothing here changes what is trained on.

Letters: b rows, T response tokens, B samples, P prompts.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

LONGEST_PERIOD = 32
"""tokens of the longest block whose repetition is looked for"""
REPEATS = 4
"""so many blocks in a row are a loop, if they are also"""
LEAST_LOOP = 16
"""tokens in all: a row of dots is none"""
ANSWER_TOKENS = 8
"""last tokens of a response, that tell answers apart"""


def looping(ids: Tensor, lengths: Tensor) -> Tensor:
    """Responses in which a block of 1 to LONGEST_PERIOD tokens follows itself, [b, T] -> [b] bool.

    With period p, token t equals token t - p for (REPEATS - 1) p tokens on end.

    Args:
        ids: [b, T] responses, padded on the right with anything.
        lengths: [b].
    """
    found = torch.zeros(len(ids), dtype=torch.bool)
    inside = torch.arange(ids.shape[1]) < lengths[:, None]
    for period in range(1, LONGEST_PERIOD + 1):
        span = max(REPEATS * period, LEAST_LOOP) - period
        if span + period > ids.shape[1]:
            break
        same = (ids[:, period:] == ids[:, :-period]) & inside[:, period:]
        before = torch.nn.functional.pad(same.cumsum(1), (1, 0))  # [b, T - period + 1]
        found |= (before[:, span:] - before[:, :-span] == span).any(1)
    return found


def answer_keys(ids: Tensor, lengths: Tensor) -> Tensor:
    """A number for the last ANSWER_TOKENS tokens of each response, equal where they are: [b].

    ids, lengths: as of `looping`.
    """
    keys = torch.zeros(len(ids), dtype=torch.long)
    for back in range(ANSWER_TOKENS, 0, -1):
        at = lengths - back
        token = ids.long().gather(1, at.clamp(min=0)[:, None])[:, 0] if ids.shape[1] else at
        keys = keys * 6364136223846793005 + torch.where(at >= 0, token + 1, 0)  # wraps around
    return keys


def distinct_share(keys: Tensor, group_ids: Tensor) -> float | None:
    """Different answers of a group over its samples, mean over groups of several, [B], [B].

    1: no two are the same. None: no group has several samples.
    """
    groups = [keys[group_ids == group] for group in group_ids.unique().tolist()]
    shares = [len(group.unique()) / len(group) for group in groups if len(group) > 1]
    return sum(shares) / len(shares) if shares else None


def flat_share(scores: Tensor, group_ids: Tensor) -> float | None:
    """Share of groups of several samples whose scores are all the same, [B], [B]; None: no such
    group. Estimators that compare siblings learn nothing from these."""
    size = group_ids.bincount()
    most = torch.full((len(size),), -torch.inf).scatter_reduce(0, group_ids, scores, "amax")
    least = torch.full((len(size),), torch.inf).scatter_reduce(0, group_ids, scores, "amin")
    several = size > 1
    return (most == least)[several].double().mean().item() if several.any() else None


Sums = dict[str, list[float]]
"""by component: n, sums of x, x^2, R, R^2 and x R, which add up over ranks"""


def component_sums(scores: Sequence[float], components: Sequence[Mapping[str, float]]) -> Sums:
    """Of the samples here; R are their scores."""
    sums: Sums = {}
    for score, parts in zip(scores, components, strict=True):
        for name, x in parts.items():
            row = (1.0, x, x * x, score, score * score, x * score)
            old = sums.get(name, [0.0] * len(row))
            sums[name] = [a + b for a, b in zip(old, row, strict=True)]
    return sums


def variance_parts(found: Sequence[Sums]) -> dict[str, float]:
    """Of each component the share of the score's variance that goes with it, 0 to 1: the square of
    their correlation. Of scores that are all the same, or a component that is, there is none.

    found: of each rank.
    """
    parts = {}
    for name in sorted({name for sums in found for name in sums}):
        rows = torch.tensor([s[name] for s in found if name in s], dtype=torch.float64)
        n, x, xx, r, rr, xr = rows.sum(0).tolist()
        of_x, of_r, both = n * xx - x * x, n * rr - r * r, n * xr - x * r
        if min(of_x, of_r) > 1e-9 * n * n and both == both:
            parts[name] = min(1.0, both * both / (of_x * of_r))
    return parts if len(parts) > 1 else {}
