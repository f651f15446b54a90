"""Batches as one process holds them, dealt out to ranks, and put together again."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ppo.batch.overview import Overview
from ppo.batch.samples import RolloutBatch, Samples, positions_up_to
from ppo.data.dataset import Prompt
from ppo.engines.contract import Completion, Completions


def make_samples(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Samples:
    """Completions in prompt-major order, len(completions) / len(prompts) of each prompt."""
    n, remainder = divmod(len(completions), len(prompts))
    assert remainder == 0
    return Samples(
        prompts=prompts,
        n=n,
        numbers=list(range(len(completions))),
        completions=Completions.of(completions),
        texts=["" for _ in completions],
    )


def make_batch(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    *,
    scores: Sequence[float] | None = None,
    failed: Sequence[int] = (),
    greedy_scores: torch.Tensor | None = None,
) -> RolloutBatch:
    """Every sample on this rank, which is dp rank 0. failed: numbers of samples without a score."""
    samples = make_samples(prompts, completions)
    size = len(samples)
    prompt_of = [samples.prompt(i) for i in range(size)]
    is_failed = torch.zeros(size, dtype=torch.bool)
    is_failed[list(failed)] = True
    lengths = torch.tensor(samples.completions.lengths)
    overview = Overview(
        group_ids=torch.arange(len(prompts)).repeat_interleave(samples.n),
        prompt_lengths=torch.tensor([len(p.prompt_ids) for p in prompt_of]),
        response_lengths=lengths,
        scores=torch.zeros(size) if scores is None else torch.tensor(scores),
        failed=is_failed,
        cut=torch.tensor([c.finish_reason == "length" for c in completions]),
        greedy_scores=greedy_scores,
    )
    ids = [
        i
        for prompt, completion in zip(prompt_of, completions, strict=True)
        for i in [*prompt.prompt_ids, *completion.response_ids]
    ]
    is_response = positions_up_to(lengths)
    logprobs = torch.zeros(is_response.shape)
    logprobs[is_response] = torch.from_numpy(samples.completions.logprobs)
    return RolloutBatch(
        all=overview,
        owners=torch.zeros(size, dtype=torch.long),
        rows=torch.arange(size),
        tokens=torch.tensor(ids, dtype=torch.int32),
        response_mask=is_response & ~is_failed[:, None],
        rollout_logprobs=logprobs,
    )


def rows_here(batch: RolloutBatch, dp: int, dp_rank: int) -> RolloutBatch:
    """A rank's rows of a batch that is whole: every dp-th sample."""
    owners = torch.arange(len(batch.all)) % dp
    rows = (owners == dp_rank).nonzero()[:, 0]
    documents = batch.documents(rows.tolist())
    longest = int(batch.all.response_lengths[rows].max()) if len(rows) else 0
    tensors = {**batch.per_token(), "response_mask": batch.response_mask}
    return replace(
        batch,
        owners=owners,
        rows=rows,
        tokens=torch.cat([batch.tokens[:0], *documents]),
        **{name: tensor[rows, :longest] for name, tensor in tensors.items()},
    )


def without(batch: RolloutBatch, number: int) -> RolloutBatch:
    """A batch that is whole, as if one of its samples had never been."""
    keep = [i for i in range(len(batch)) if i != number]
    overview: dict[str, Any] = {
        name: value[keep] if isinstance(value, torch.Tensor) and len(value) == len(batch) else value
        for name, value in vars(batch.all).items()
    }
    tensors = {**batch.per_token(), "response_mask": batch.response_mask}
    return replace(
        batch,
        all=Overview(**overview),
        owners=batch.owners[keep],
        rows=torch.arange(len(keep)),
        tokens=torch.cat(batch.documents(keep)),
        **{name: tensor[keep] for name, tensor in tensors.items()},
    )


def responses(batch: RolloutBatch) -> list[list[int]]:
    """Token ids of the responses of the rows here."""
    documents = batch.documents(range(len(batch)))
    lengths = batch.prompt_lengths.tolist()
    return [d[length:].tolist() for d, length in zip(documents, lengths, strict=True)]


def put_together(batch: RolloutBatch) -> Any:
    """What is known of all samples, and responses and advantages of all ranks. Collective."""
    assert batch.advantages is not None
    mine = zip(
        batch.rows.tolist(), responses(batch), batch.advantages, batch.response_mask, strict=True
    )
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, list(mine))
    rows = {number: row for part in parts for number, *row in part}  # copies within an sp group
    assert sorted(rows) == list(range(len(batch.all)))
    ids, advantages, masks = zip(*(rows[number] for number in sorted(rows)), strict=True)
    pad = torch.nn.utils.rnn.pad_sequence
    return SimpleNamespace(
        response_ids=list(ids),
        advantages=pad(list(advantages), batch_first=True),
        response_mask=pad(list(masks), batch_first=True),
        group_ids=batch.all.group_ids,
        scores=batch.all.scores,
        failed=batch.all.failed,
        greedy_scores=batch.all.greedy_scores,
    )
