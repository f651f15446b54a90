"""How work is divided by its cost: sequences over ranks and micro-batches, requests over engines.

Owns what a sequence costs and the greedy rules. Pure numbers: every rank derives the same shares
from the same lengths. Must not know tensors.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How sequences are laid out: over `dp` ranks, then over micro-batches.

    tokens: most tokens of one micro-batch of one sp group (per-GPU budget x sp); None = no limit.
    count: most sequences of one micro-batch; None = no limit.
    sequences: of an update on a rank, on average: what is halved where there is no limit.
    padded: a micro-batch costs its sequences times the longest of them, else the sum of lengths.
    hidden_size: weighs the linear against the quadratic part of a sequence's cost.
    """

    dp: int
    tokens: int | None = None
    count: int | None = None
    sequences: int = 1
    padded: bool = False
    balance: bool = True
    hidden_size: int = 1024

    def cost(self, length: int) -> int:
        """FLOPs of a sequence up to a factor: 24 H^2 per token and layer, plus 2 H s attention."""
        return length * (12 * self.hidden_size + length)

    def halved(self, longest: int) -> "Budget | None":
        """Half of the tokens or sequences of a micro-batch; None where each sequence has its own.

        longest: tokens of the longest sequence that there may be.
        """
        if self.tokens is not None:
            tokens = max(self.tokens // 2, longest)
            return replace(self, tokens=tokens) if tokens < self.tokens else None
        count = (self.count or self.sequences) // 2
        return replace(self, count=count) if count else None

    def fits(self, count: int, total: int, longest: int) -> bool:
        """True when so many sequences, of so many tokens, may share a micro-batch."""
        if count <= 1:
            return True  # one alone always may
        if self.count is not None and count > self.count:
            return False
        return self.tokens is None or (count * longest if self.padded else total) <= self.tokens


@dataclass
class _Bin:
    """A micro-batch that is being filled."""

    items: list[int] = field(default_factory=list)
    total: int = 0
    longest: int = 0
    load: int = 0

    def takes(self, item: int, length: int, budget: Budget) -> bool:
        """Add the item if it fits."""
        longest = max(self.longest, length)
        if not budget.fits(len(self.items) + 1, self.total + length, longest):
            return False
        self.items.append(item)
        self.total, self.longest = self.total + length, longest
        self.load += budget.cost(length)
        return True


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


def count_micro_batches(lengths: Sequence[int], mine: Sequence[int], budget: Budget) -> int:
    """Micro-batches that this rank's sequences need, 0 without any."""
    return len(_first_fit(lengths, mine, budget))


def micro_batches(
    lengths: Sequence[int], mine: Sequence[int], budget: Budget, number: int
) -> list[list[int]]:
    """Lay this rank's sequences out as `number` micro-batches, some of which may be empty.

    Args:
        lengths: tokens of every sequence that `mine` may name.
        mine: the sequences of this rank.
        number: at least what `count_micro_batches` says. A sequence longer than the budget has a
            micro-batch of its own.
    """
    spread = _balanced(lengths, mine, number, budget)
    if spread is not None:
        return spread
    bins = [b.items for b in _first_fit(lengths, mine, budget)]
    return bins + [[] for _ in range(number - len(bins))]


def _longest_first(lengths: Sequence[int], mine: Sequence[int]) -> list[int]:
    return sorted(mine, key=lambda i: (-lengths[i], i))


def _first_fit(lengths: Sequence[int], mine: Sequence[int], budget: Budget) -> list[_Bin]:
    """First-fit decreasing: the fewest micro-batches that this simple rule finds."""
    bins: list[_Bin] = []
    for index in _longest_first(lengths, mine):
        if not any(b.takes(index, lengths[index], budget) for b in bins):
            bins.append(_Bin())
            bins[-1].takes(index, lengths[index], budget)
    return bins


def _balanced(
    lengths: Sequence[int], mine: Sequence[int], number: int, budget: Budget
) -> list[list[int]] | None:
    """Spread sequences over `number` micro-batches by cost; None where the budget breaks."""
    bins = [_Bin() for _ in range(number)]
    for index in _longest_first(lengths, mine):
        by_load = sorted(bins, key=lambda b: b.load)
        if not any(b.takes(index, lengths[index], budget) for b in by_load):
            return None
    return [b.items for b in bins]
