"""Which tokens of a mini-batch Clip-Cov and KL-Cov treat apart: pure tensor maths.

Owns the covariance of a token and the choice of a fixed number of tokens over all ranks. Must not
know configurations, models or ranks, except through a `group` argument. Letters: b sequences of
this rank, T response tokens. What does not count may hold anything.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ppo.advantages import all_reduced


def covariances(
    advantages: Tensor, logprobs: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """(A - mean A) (log pi - mean log pi) of each token (arXiv 2505.22617, eq. 9), float64 [b, T].

    Args:
        advantages, logprobs: [b, T].
        mask: bool [b, T], the tokens of the mini-batch that count; 0 elsewhere.
        group: ranks that hold a part of the mini-batch each; every one calls. None: all is here.
    """
    a, x = (torch.where(mask, values.double(), 0.0) for values in (advantages, logprobs))
    sums = all_reduced(torch.stack([a.sum(), x.sum(), mask.sum().double()]), group)
    mean_a, mean_x = sums[:2] / sums[2].clamp(min=1)
    return torch.where(mask, (a - mean_a) * (x - mean_x), 0.0)


def largest(
    values: Tensor, candidates: Tensor, count: int, group: dist.ProcessGroup | None = None
) -> Tensor:
    """bool [b, T]: the `count` candidates of all ranks with the largest values; equal ones alike.

    Args:
        values: float64 [b, T].
        candidates: bool [b, T].
        count: the same on every rank.
        group: as for `covariances`.
    """
    best = values.new_full((count,), -torch.inf)
    own = values[candidates].topk(min(count, int(candidates.sum()))).values
    best[: len(own)] = own
    if group is not None:
        parts = [torch.empty_like(best) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, best, group=group)
        best = torch.cat(parts).topk(count).values
    return candidates & (values >= best[-1])


def noise(key: Sequence[int], numbers: Sequence[int], length: int) -> Tensor:
    """Uniform float64 [b, length] for a random choice that does not depend on who makes it.

    Args:
        key: seed, step, epoch.
        numbers: of the samples.
    """
    rows = [np.random.default_rng([*key, number]).random(length) for number in numbers]
    return torch.from_numpy(np.array(rows).reshape(len(rows), length))
