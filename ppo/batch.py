"""The rollout batch and how it is cut: mini-batches, dp ranks, micro-batches, packed rows.

Owns the shape legend and everything that decides which rank computes which sequence. Knows no
model, no optimizer and no process group: every rank holds the whole batch on its host and derives
the same partition from it, so that no collective is needed to agree.

Shape legend (the whole project): B sequences, P prompt tokens, T response tokens, S = P + T,
N packed tokens, K scored (response) tokens of one micro-batch, V vocabulary, H hidden.
One alignment: index t of logprobs, values, rewards and response_mask speaks of response token t.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ppo.data.dataset import Prompt
from ppo.engines.contract import Completion


@dataclass(kw_only=True)
class RolloutBatch:
    """B = prompts x n sequences in prompt-major order; host tensors, the same on every rank.

    response_mask [B, T] bool, True = the token counts: a padding position, or any token of a
    sample whose reward failed, does not. Optional tensors are filled as the step goes on.
    """

    prompts: list[Prompt]  # B entries, the n samples of a prompt share one object
    response_ids: list[list[int]]  # B
    finish_reasons: list[str]  # B
    group_ids: Tensor  # [B] index of the prompt inside this batch
    response_mask: Tensor  # [B, T] bool
    rollout_logprobs: Tensor  # [B, T] float32, from the engine
    scores: Tensor  # [B] float32, from the rewards
    failed: Tensor  # [B] bool, the reward raised, timed out or was not finite
    greedy: "RolloutBatch | None" = None  # ReMax: one response per prompt, to compare with
    old_logprobs: Tensor | None = None  # [B, T] trainer, before the update
    ref_logprobs: Tensor | None = None  # [B, T]
    values: Tensor | None = None  # [B, T] critic, before the update
    rewards: Tensor | None = None  # [B, T] per token, KL penalty included
    advantages: Tensor | None = None  # [B, T]
    returns: Tensor | None = None  # [B, T]
    loss_weights: Tensor | None = None  # [B, T] rollout correction

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt, B entries."""
        return [len(p.prompt_ids) for p in self.prompts]

    @property
    def lengths(self) -> list[int]:
        """Prompt plus response tokens, B entries."""
        return [
            len(p.prompt_ids) + len(r) for p, r in zip(self.prompts, self.response_ids, strict=True)
        ]


def make_batch(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> RolloutBatch:
    """Build the batch from completions in prompt-major order (`len(completions) = prompts x n`)."""
    n, remainder = divmod(len(completions), len(prompts))
    assert n > 0 and remainder == 0, (len(completions), len(prompts))
    lengths = torch.tensor([len(c.response_ids) for c in completions])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]  # [B, T]
    logprobs = torch.zeros(mask.shape)
    logprobs[mask] = torch.tensor([x for c in completions for x in c.logprobs])
    return RolloutBatch(
        prompts=[p for p in prompts for _ in range(n)],
        response_ids=[list(c.response_ids) for c in completions],
        finish_reasons=[c.finish_reason for c in completions],
        group_ids=torch.arange(len(prompts)).repeat_interleave(n),
        response_mask=mask,
        rollout_logprobs=logprobs,
        scores=torch.zeros(len(completions)),
        failed=torch.zeros(len(completions), dtype=torch.bool),
    )


def mini_batches(group_ids: Tensor, *, num_prompts: int, seed: int | None = None) -> list[Tensor]:
    """Cut the batch into mini-batches of `num_prompts` prompts, all samples of a prompt together.

    Args:
        group_ids: [B], ascending.
        num_prompts: prompts of one mini-batch over all ranks; the last one may be smaller.
        seed: None keeps the order, else prompts are shuffled with it.

    Returns:
        Index tensors into the batch. They never depend on the number of ranks.
    """
    groups = group_ids.unique()
    if seed is not None:
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed))]
    return [
        torch.cat([(group_ids == g).nonzero()[:, 0] for g in part])
        for part in groups.split(num_prompts)
    ]


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
    ranks: list[list[int]] = [[] for _ in range(budget.dp)]
    load = [0] * budget.dp
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        lightest = load.index(min(load))
        ranks[lightest].append(index)
        load[lightest] += budget.cost(lengths[index])
    return ranks


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


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Inputs of one forward pass, and where its K scored tokens stand in the [B, T] tensors."""

    inputs: dict[str, Tensor]  # what the model's forward takes, labels apart
    labels: Tensor  # [K] the response tokens to score
    rows: Tensor  # [K] host
    cols: Tensor  # [K] host
    num_tokens: int  # real tokens, of this rank's slice
    num_padding: int = field(default=0)  # padding tokens, of this rank's slice

    def take(self, tensor: Tensor) -> Tensor:
        """Pick the K entries of a [B, T] host tensor, moved to the device of the labels."""
        return to_device(tensor[self.rows, self.cols], self.labels.device)  # [K]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device, without waiting for it on CUDA."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def make_micro_batch(
    batch: RolloutBatch,
    indices: Sequence[int],
    *,
    device: torch.device,
    packed: bool = True,
    sp: int = 1,
    sp_rank: int = 0,
    pad_id: int = 0,
) -> MicroBatch:
    """Lay the sequences out as one packed row [1, N] (this rank's 1/sp slice) or padded [b, S].

    The hidden state at packed index j scores token j + 1, so response token t of a sequence that
    starts at `offset` with P prompt tokens is scored at offset + P + t - 1. An empty list becomes
    one padding token, so that every rank runs the same number of forward and backward passes.
    """
    documents = [
        torch.tensor(list(batch.prompts[i].prompt_ids) + batch.response_ids[i]) for i in indices
    ] or [torch.tensor([pad_id])]
    lengths = [len(d) for d in documents]
    width = max(lengths)
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + (length if packed else width))
    rows, cols, positions = [], [], []
    for start, i in zip(starts, indices, strict=False):
        cols.append(batch.response_mask[i].nonzero()[:, 0])
        rows.append(torch.full_like(cols[-1], i))
        positions.append(cols[-1] + start + len(batch.prompts[i].prompt_ids) - 1)
    row, col, position = (
        torch.cat(x) if x else torch.zeros(0, dtype=torch.long) for x in (rows, cols, positions)
    )
    if packed:
        inputs, kept, offset = _packed_inputs(documents, pad_id, sp, sp_rank)
        inside = (position >= offset) & (position < offset + inputs["input_ids"].numel())
        row, col, position = row[inside], col[inside], position[inside] - offset
    else:
        inputs, kept = _padded_inputs(documents, width, pad_id), sum(lengths)
    labels = torch.tensor(
        [batch.response_ids[i][t] for i, t in zip(row.tolist(), col.tolist(), strict=True)],
        dtype=torch.long,
    )
    moved = {
        name: value if name == "cu_seqlens" else to_device(value, device)
        for name, value in (inputs | {"positions": position}).items()
    }
    return MicroBatch(
        inputs=moved,
        labels=to_device(labels, device),
        rows=row,
        cols=col,
        num_tokens=kept if indices else 0,
        num_padding=inputs["input_ids"].numel() - (kept if indices else 0),
    )


def _packed_inputs(
    documents: list[Tensor], pad_id: int, sp: int, sp_rank: int
) -> tuple[dict[str, Tensor], int, int]:
    """One row cut into sp slices; padding to a multiple of sp is one more document."""
    pad = -sum(len(d) for d in documents) % sp
    total = sum(len(d) for d in documents)
    if pad:
        documents = [*documents, torch.full((pad,), pad_id)]
    ids = torch.cat(documents)  # [sp * N]
    positions = torch.cat([torch.arange(len(d)) for d in documents])
    bounds = torch.tensor([0] + [len(d) for d in documents]).cumsum(0)
    size = len(ids) // sp
    offset = size * sp_rank
    inputs = {
        "input_ids": ids[offset : offset + size][None],  # [1, N]
        "position_ids": positions[offset : offset + size][None],
        "cu_seqlens": bounds,
    }
    return inputs, max(0, min(total - offset, size)), offset


def _padded_inputs(documents: list[Tensor], width: int, pad_id: int) -> dict[str, Tensor]:
    lengths = torch.tensor([len(d) for d in documents])
    mask = torch.arange(width) < lengths[:, None]  # [b, S]
    ids = torch.full(mask.shape, pad_id)
    ids[mask] = torch.cat(documents)
    position_ids = torch.arange(width).expand(len(documents), -1) * mask
    return {"input_ids": ids, "position_ids": position_ids, "attention_mask": mask.long()}
