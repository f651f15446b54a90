"""Which rank computes with which samples, and how they get there.

Owns the two moves of a step: from the engines that made samples to the ranks that train on them,
and between ranks where the mini-batches of another epoch or model are cut differently. Must not
know models or what the numbers mean.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ppo.batch.overview import Overview
from ppo.batch.samples import RolloutBatch, Samples, positions_up_to
from sharding.mesh import Mesh
from sharding.partition import Budget, assign
from sharding.rows import RowExchange


def overview_of(samples: Samples, mesh: Mesh) -> tuple[Overview, Tensor]:
    """What every rank is told of all rows, and the rank [B] that has made each. Collective."""
    has_episodes = samples.conversations is not None
    rows = [samples.rows(i) for i in range(len(samples))]
    sample_ids = _sample_ids(samples, [len(own) for own in rows], mesh)
    mine = torch.tensor(
        [
            [
                mesh.rank,
                len(row.prompt_ids),
                row.length,
                score,
                failed or (has_episodes and not any(row.num_learned for row in own)),
                reason == "length",
                row.length - row.num_learned,
                earned - score,
            ]
            for own, earned, score, failed, reason in zip(
                rows,
                map(samples.total_score, range(len(samples))),
                samples.scores.tolist(),
                samples.failed.tolist(),
                samples.completions.finish_reasons,
                strict=True,
            )
            for row in own
        ],
        dtype=torch.float64,
    ).reshape(-1, 8)
    table = torch.zeros(len(sample_ids), 8, dtype=torch.float64)
    table[torch.isin(sample_ids, torch.tensor(samples.numbers, dtype=torch.long))] = mine
    dist.all_reduce(table, group=mesh.host_group)  # one rank has each row, the others zeros
    holders, prompts, responses, scores, failed, cut, observed, turns = table.unbind(1)
    overview = Overview(
        group_ids=sample_ids // samples.n,
        prompt_lengths=prompts.long(),
        response_lengths=responses.long(),
        scores=scores.float(),
        failed=failed.bool(),
        cut=cut.bool(),
        greedy_scores=samples.greedy_scores,
        are_scored=samples.are_scored,
        observed=observed.long() if has_episodes else None,
        samples=sample_ids if has_episodes else None,
        turn_rewards=turns.float() if has_episodes else None,
    )
    return overview, holders.long()


def _sample_ids(samples: Samples, num_rows: list[int], mesh: Mesh) -> Tensor:
    """[B] number of the sample of each row. Collective where samples are episodes."""
    counts = torch.ones(samples.total, dtype=torch.long)
    if samples.conversations is not None:
        counts = torch.zeros_like(counts)
        counts[samples.numbers] = torch.tensor(num_rows, dtype=torch.long)
        dist.all_reduce(counts, group=mesh.host_group)  # one rank has each, the others zeros
    return torch.arange(samples.total).repeat_interleave(counts)


def owners_of(overview: Overview, parts: list[list[int]], budget: Budget) -> Tensor:
    """[B] dp rank of each sample, such that every rank has an equal part of every mini-batch.

    parts: the mini-batches; every sample is in one of them.
    """
    costs = torch.where(overview.failed, 0, overview.lengths).tolist()  # of no use in an update
    owners = torch.zeros(len(overview), dtype=torch.long)
    for part in parts:
        for rank, share in enumerate(assign(costs, part, budget)):
            owners[share] = rank
    return owners


def share_out(
    samples: Samples, overview: Overview, holders: Tensor, owners: Tensor, mesh: Mesh
) -> RolloutBatch:
    """The samples that this rank computes with, from the ranks that made them. Collective."""
    exchange = RowExchange(holders, owners, mesh)
    rows = [row for i in range(len(samples)) for row in samples.rows(i)]
    ends = np.cumsum([row.length for row in rows])
    parts = [
        part
        for row, end in zip(rows, ends, strict=True)
        for part in (
            np.asarray(row.prompt_ids, np.int32),
            samples.completions.ids[end - row.length : end],
        )
    ]
    tokens = torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0, np.int32))
    lengths = overview.response_lengths
    is_response = positions_up_to(lengths[exchange.owned])

    def moved(flat: np.ndarray) -> Tensor:
        return _padded(exchange.move(torch.from_numpy(flat), lengths), is_response)

    batch = RolloutBatch(
        all=overview,
        owners=owners,
        rows=exchange.owned,
        tokens=exchange.move(tokens, overview.lengths),
        response_mask=is_response & ~overview.failed[exchange.owned, None],
        rollout_logprobs=moved(samples.completions.logprobs),
    )
    if samples.conversations is not None:
        segments = [segment for one in samples.conversations for segment in one.segments]
        nothing = np.zeros(0)
        learned = [nothing.astype(bool), *(segment.learned for segment in segments)]
        rewards = [nothing.astype(np.float32), *(segment.rewards for segment in segments)]
        batch.learned = moved(np.concatenate(learned))
        batch.turn_rewards = moved(np.concatenate(rewards))
        batch.response_mask &= batch.learned
    return batch


def move(batch: RolloutBatch, owners: Tensor, mesh: Mesh) -> None:
    """Give every sample of the batch, with all that is known of it, to another rank. Collective."""
    if torch.equal(owners, batch.owners):
        return
    exchange = RowExchange(batch.owners * mesh.dims.sp, owners, mesh)
    lengths, was_response = batch.all.response_lengths, batch.is_response
    is_sender = mesh.sp_rank == 0  # the others hold copies
    held = {name: x[was_response] for name, x in batch.per_token().items()}
    held |= {"response_mask": batch.response_mask[was_response], "tokens": batch.tokens}
    if batch.ref_hidden is not None:
        held["ref_hidden"], batch.ref_hidden = batch.ref_hidden, None
    batch.owners, batch.rows = owners, exchange.owned
    for name in [*held]:  # the largest, the states, are given up while they are sent
        size = batch.all.lengths if name == "tokens" else lengths
        given = [held.pop(name)[: None if is_sender else 0]]
        moved = exchange.take(given, size)
        stays_flat = name in ("tokens", "ref_hidden")
        setattr(batch, name, moved if stays_flat else _padded(moved, batch.is_response))
    if batch.ref_hidden is not None and mesh.device.type == "cuda":
        batch.ref_hidden = batch.ref_hidden.pin_memory()


def _padded(flat: Tensor, is_response: Tensor) -> Tensor:
    """[b, T], 0 where nothing is."""
    result = torch.zeros(is_response.shape, dtype=flat.dtype)
    result[is_response] = flat
    return result
