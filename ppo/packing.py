"""Which rank computes which tokens: its micro-batches, as packed or padded rows.

Knows no optimizer and no process group: every rank lays out the whole batch and takes its part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ppo.batch import RolloutBatch
from ppo.config import ActorConfig, Config, CriticConfig
from ppo.models.build import is_packable
from ppo.models.learner import Model
from ppo.models.roles import Models
from sharding.mesh import Mesh
from sharding.offload import to_device
from sharding.partition import Budget, partition

PAD_ID = 0
"""an id that every model has: no real token attends to padding, so that it may be any; a
tokenizer's padding token may lie outside of the model's embedding"""


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


def make_micro_batch(
    batch: RolloutBatch,
    indices: Sequence[int],
    *,
    device: torch.device,
    packed: bool = True,
    sp: int = 1,
    sp_rank: int = 0,
) -> MicroBatch:
    """Lay the sequences out as one packed row [1, N] (this rank's 1/sp slice) or padded [b, S].

    The hidden state at packed index j scores token j + 1, so response token t of a sequence that
    starts at `offset` with P prompt tokens is scored at offset + P + t - 1. An empty list becomes
    one padding token, so that every rank runs the same number of forward and backward passes.
    """
    documents = [
        torch.tensor(list(batch.prompts[i].prompt_ids) + batch.response_ids[i]) for i in indices
    ] or [torch.tensor([PAD_ID])]
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
        inputs, kept, offset = _packed_inputs(documents, sp, sp_rank)
        inside = (position >= offset) & (position < offset + inputs["input_ids"].numel())
        row, col, position = row[inside], col[inside], position[inside] - offset
    else:
        inputs, kept = _padded_inputs(documents, width), sum(lengths)
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
    documents: list[Tensor], sp: int, sp_rank: int
) -> tuple[dict[str, Tensor], int, int]:
    """One row cut into sp slices; padding to a multiple of sp is one more document."""
    pad = -sum(len(d) for d in documents) % sp
    total = sum(len(d) for d in documents)
    if pad:
        documents = [*documents, torch.full((pad,), PAD_ID)]
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


def _padded_inputs(documents: list[Tensor], width: int) -> dict[str, Tensor]:
    lengths = torch.tensor([len(d) for d in documents])
    mask = torch.arange(width) < lengths[:, None]  # [b, S]
    ids = torch.full(mask.shape, PAD_ID)
    ids[mask] = torch.cat(documents)
    position_ids = torch.arange(width).expand(len(documents), -1) * mask
    return {"input_ids": ids, "position_ids": position_ids, "attention_mask": mask.long()}


@dataclass(frozen=True, kw_only=True)
class Batcher:
    """Cuts sequences into this rank's micro-batches under one budget.

    packed: one row without padding (`model.use_remove_padding`), else right-padded rows.
    """

    mesh: Mesh
    budget: Budget
    packed: bool

    def plan(self, batch: RolloutBatch, indices: Sequence[int]) -> list[list[int]]:
        """Sequences of each of this rank's micro-batches; every rank has equally many.

        Samples without a token that counts are left out.
        """
        counting = batch.response_mask.any(-1)
        kept = [i for i in indices if counting[i]]
        return partition(batch.lengths, kept, self.budget)[self.mesh.dp_rank]

    def make(self, batch: RolloutBatch, indices: Sequence[int]) -> MicroBatch:
        """Tensors of one micro-batch, on the device."""
        return make_micro_batch(
            batch,
            indices,
            device=self.mesh.device,
            packed=self.packed,
            sp=self.mesh.dims.sp,
            sp_rank=self.mesh.sp_rank,
        )


class Batchers(NamedTuple):
    """How sequences are laid out for each pass."""

    actor: Batcher
    critic: Batcher
    ref: Batcher


def make_batchers(config: Config, mesh: Mesh, models: Models) -> Batchers:
    """Budgets of the updates and of the forward-only pass of the reference."""
    actor, critic = config.actor, config.critic
    batcher = partial(make_batcher, config, mesh)
    return Batchers(
        actor=batcher(models.actor, tokens=actor.ppo_max_token_len_per_gpu),
        critic=batcher(
            models.critic or models.actor, tokens=critic.ppo_max_token_len_per_gpu, section=critic
        ),
        ref=batcher(models.actor, tokens=config.ref.log_prob_max_token_len_per_gpu),
    )


def make_batcher(
    config: Config,
    mesh: Mesh,
    model: Model,
    *,
    tokens: int,
    section: ActorConfig | CriticConfig | None = None,
) -> Batcher:
    """The layout of one model's passes: `tokens` per rank, or the sequences that `section` says.

    section: whose keys say how micro-batches are cut; None = the actor's.
    """
    section = section or config.actor
    dynamic, dims = section.use_dynamic_bsz, mesh.dims
    packed = config.model.use_remove_padding and is_packable(model.module)
    budget = Budget(
        dp=dims.dp,
        tokens=tokens * dims.sp if dynamic else None,
        count=None if dynamic else section.ppo_micro_batch_size_per_gpu,
        padded=not packed,
        balance=config.trainer.balance_batch,
        hidden_size=model.hf_config.hidden_size,
    )
    return Batcher(mesh=mesh, budget=budget, packed=packed)
