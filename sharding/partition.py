"""How work is divided by its cost: sequences over ranks and micro-batches, requests over engines.

Owns what a sequence costs and the greedy rules. Pure numbers: every rank derives the same partition
from the same lengths, so that no collective is needed to agree. Must not know tensors.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How sequences are laid out: over `dp` ranks, then over micro-batches.

    tokens: most tokens of one micro-batch of one sp group (per-GPU budget x sp); None = no limit.
    count: most sequences of one micro-batch; None = no limit.
    padded: a micro-batch costs its sequences times the longest of them, else the sum of lengths.
    hidden_size: weighs the linear against the quadratic part of a sequence's cost.
    """

    dp: int
    tokens: int | None = None
    count: int | None = None
    padded: bool = False
    balance: bool = True
    hidden_size: int = 1024

    def cost(self, length: int) -> int:
        """FLOPs of a sequence up to a factor: 24 H^2 per token and layer, plus 2 H s attention."""
        return length * (12 * self.hidden_size + length)

    def fits(self, lengths: Sequence[int]) -> bool:
        """True when sequences of these lengths may share a micro-batch (one alone always may)."""
        if len(lengths) <= 1:
            return True
        if self.count is not None and len(lengths) > self.count:
            return False
        size = len(lengths) * max(lengths) if self.padded else sum(lengths)
        return self.tokens is None or size <= self.tokens


def partition(lengths: Sequence[int], indices: Sequence[int], budget: Budget) -> list[list[list]]:
    """Lay sequences out as [dp rank][micro-batch][index], the same number for every rank.

    Args:
        lengths: tokens of every sequence of the batch, B entries.
        indices: the sequences of this mini-batch.

    Returns:
        dp lists of equally many micro-batches; some may be empty. A sequence longer than the
        budget has a micro-batch of its own.
    """
    ranks = assign(lengths, indices, budget)
    bins = [_first_fit(lengths, mine, budget) for mine in ranks]
    number = max(1, max(len(b) for b in bins))
    return [
        _balanced(lengths, mine, number, budget) or b + [[] for _ in range(number - len(b))]
        for mine, b in zip(ranks, bins, strict=True)
    ]


def assign(lengths: Sequence[int], indices: Sequence[int], budget: Budget) -> list[list[int]]:
    """Give each sequence to a dp rank: the costliest first, always to the least loaded rank."""
    if not budget.balance:
        return [list(indices[rank :: budget.dp]) for rank in range(budget.dp)]
    ordered = sorted(indices)
    shares = largest_first([budget.cost(lengths[i]) for i in ordered], budget.dp)
    return [[ordered[number] for number in share] for share in shares]


def largest_first(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Greedy partition: the largest cost that is left goes to the part with the least.

    Args:
        costs: of each item.
        parts: number of parts; there may be more than items.

    Returns:
        Item numbers of each part, in falling order of their costs. Of equal costs and of equal
        parts the first comes first.
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads: list[tuple[float, int]] = [(0, part) for part in range(parts)]
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, part = heapq.heappop(loads)
        shares[part].append(item)
        heapq.heappush(loads, (load + costs[item], part))
    return shares


def _first_fit(lengths: Sequence[int], mine: Sequence[int], budget: Budget) -> list[list[int]]:
    """First-fit decreasing: the fewest micro-batches that this simple rule finds."""
    bins: list[list[int]] = []
    for index in sorted(mine, key=lambda i: (-lengths[i], i)):
        for candidate in bins:
            if budget.fits([lengths[i] for i in (*candidate, index)]):
                candidate.append(index)
                break
        else:
            bins.append([index])
    return bins


def _balanced(
    lengths: Sequence[int], mine: Sequence[int], number: int, budget: Budget
) -> list[list[int]] | None:
    """Spread sequences over `number` micro-batches by cost; None where the budget breaks."""
    bins: list[list[int]] = [[] for _ in range(number)]
    load = [0] * number
    for index in sorted(mine, key=lambda i: (-lengths[i], i)):
        for slot in sorted(range(number), key=lambda s: load[s]):
            if budget.fits([lengths[i] for i in (*bins[slot], index)]):
                bins[slot].append(index)
                load[slot] += budget.cost(lengths[index])
                break
        else:
            return None
    return bins
