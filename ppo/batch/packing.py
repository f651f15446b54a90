"""How this rank's rows become forward passes: micro-batches, packed or padded.

Owns the layout of a pass. Knows no optimizer, and of the other ranks only how many passes they run.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ppo.batch.samples import RolloutBatch, positions_up_to
from ppo.config import ActorConfig, Config, CriticConfig
from ppo.models.build import is_packable
from ppo.models.learner import Model
from ppo.models.roles import Models
from sharding.mesh import Mesh
from sharding.offload import to_device
from sharding.partition import Budget, count_micro_batches, micro_batches
from sharding.progress import PROGRESS

logger = logging.getLogger(__name__)

PAD_ID = 0
"""an id that every model has: no real token attends to padding, so that it may be any; a
tokenizer's padding token may lie outside of the model's embedding"""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Inputs of one forward pass, and where its K scored tokens stand in the [b, T] tensors."""

    inputs: dict[str, Tensor]  # what the model's forward takes, labels apart
    labels: Tensor  # [K] the response tokens to score
    sequences: Tensor  # [r] host, rows of the batch that are laid out here
    numbers: Tensor  # [K] host, which of them each token belongs to
    cols: Tensor  # [K] host, and where in its response it stands
    num_tokens: int  # real tokens, of this rank's slice
    num_padding: int = field(default=0)  # padding tokens, of this rank's slice

    @property
    def rows(self) -> Tensor:
        """[K] host, the row of the batch that each token belongs to."""
        return self.sequences[self.numbers]

    def take(self, tensor: Tensor) -> Tensor:
        """Pick the K entries of a [b, T] host tensor, moved to the device of the labels."""
        return self.put(tensor[self.rows, self.cols])  # [K]

    def put(self, values: Tensor) -> Tensor:
        """A host tensor on the device of the labels."""
        return to_device(values, self.labels.device)


def make_micro_batch(
    batch: RolloutBatch,
    indices: Sequence[int],
    *,
    device: torch.device,
    packed: bool = True,
    sp: int = 1,
    sp_rank: int = 0,
) -> MicroBatch:
    """Lay rows out as one packed row [1, N] (this rank's 1/sp slice) or padded [r, S].

    The hidden state at packed index j scores token j + 1, so response token t of a sequence that
    starts at `offset` with P prompt tokens is scored at offset + P + t - 1. An empty list becomes
    one padding token, so that every rank runs the same number of forward and backward passes.

    Args:
        indices: rows of `batch` on this rank.
    """
    documents = batch.documents(indices) or [torch.tensor([PAD_ID])]
    lengths = [len(d) for d in documents]
    ids = torch.cat(documents).long()  # of all documents, one after the other
    width = max(lengths)
    starts = torch.tensor(list(accumulate(lengths, initial=0)))
    numbers, cols = batch.response_mask[list(indices)].nonzero(as_tuple=True)
    before = cols + batch.prompt_lengths[list(indices)][numbers] - 1  # in its document
    position = before + (starts[numbers] if packed else numbers * width)
    labels = ids[before + starts[numbers] + 1]
    if packed:
        inputs, kept, offset = _packed_inputs(ids, lengths, sp, sp_rank)
        inside = (position >= offset) & (position < offset + inputs["input_ids"].numel())
        numbers, cols, labels = numbers[inside], cols[inside], labels[inside]
        position = position[inside] - offset
    else:
        inputs, kept = _padded_inputs(ids, lengths), len(ids)
    moved = {
        name: value if name == "cu_seqlens" else to_device(value, device)
        for name, value in (inputs | {"positions": position}).items()
    }
    return MicroBatch(
        inputs=moved,
        labels=to_device(labels, device),
        sequences=torch.tensor(list(indices), dtype=torch.long),
        numbers=numbers,
        cols=cols,
        num_tokens=kept if indices else 0,
        num_padding=inputs["input_ids"].numel() - (kept if indices else 0),
    )


def _packed_inputs(
    ids: Tensor, lengths: list[int], sp: int, sp_rank: int
) -> tuple[dict[str, Tensor], int, int]:
    """One row cut into sp slices; padding to a multiple of sp is one more document."""
    total = len(ids)
    pad = -total % sp
    if pad:
        ids, lengths = torch.cat([ids, ids.new_full((pad,), PAD_ID)]), [*lengths, pad]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.arange(len(ids)) - bounds[:-1].repeat_interleave(torch.tensor(lengths))
    size = len(ids) // sp
    offset = size * sp_rank
    inputs = {
        "input_ids": ids[offset : offset + size][None],  # [1, N]
        "position_ids": positions[offset : offset + size][None],
        "cu_seqlens": bounds,
    }
    return inputs, max(0, min(total - offset, size)), offset


def _padded_inputs(ids: Tensor, lengths: list[int]) -> dict[str, Tensor]:
    mask = positions_up_to(torch.tensor(lengths))  # [r, S]
    rows = torch.full(mask.shape, PAD_ID)
    rows[mask] = ids
    position_ids = torch.arange(mask.shape[1]).expand(mask.shape) * mask
    return {"input_ids": rows, "position_ids": position_ids, "attention_mask": mask.long()}


@dataclass(kw_only=True)
class Batcher:
    """Cuts sequences into this rank's micro-batches under one budget, which may be halved.

    packed: one row without padding (`model.use_remove_padding`), else right-padded rows.
    """

    mesh: Mesh
    budget: Budget
    packed: bool

    def halve(self, longest: int) -> bool:
        """Cut micro-batches of half as many tokens (or sequences) from now on; said.

        False where each sequence has a micro-batch of its own already.

        longest: tokens of the longest sequence that there may be.
        """
        half = self.budget.halved(longest)
        if half is None:
            logger.warning("micro-batches cannot be smaller", extra={"every_rank": True})
            return False
        self.budget = half
        what = f"{half.tokens} tokens" if half.tokens is not None else f"{half.count} sequences"
        logger.info("micro-batches have at most %s from now on", what)
        return True

    def plan(self, batch: RolloutBatch, parts: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        """This rank's rows of each part, as micro-batches; every rank has equally many of a part.

        Samples without a token that counts are left out. Collective.

        Args:
            parts: numbers of samples, each to be laid out by itself.
        """
        row_of = {number: row for row, number in enumerate(batch.rows.tolist())}
        counts = batch.response_mask.any(-1).tolist()
        lengths = batch.lengths.tolist()
        mine = [
            [row for number in part if (row := row_of.get(number)) is not None and counts[row]]
            for part in parts
        ]
        needed = torch.tensor(
            [max(1, count_micro_batches(lengths, rows, self.budget)) for rows in mine]
        )
        dist.all_reduce(needed, dist.ReduceOp.MAX, group=self.mesh.host_group)
        return [
            micro_batches(lengths, rows, self.budget, number)
            for rows, number in zip(mine, needed.tolist(), strict=True)
        ]

    def make(self, batch: RolloutBatch, indices: Sequence[int]) -> MicroBatch:
        """Tensors of one micro-batch, on the device; the one before has been launched."""
        PROGRESS.tick()
        PROGRESS.arrive()
        micro = make_micro_batch(
            batch,
            indices,
            device=self.mesh.device,
            packed=self.packed,
            sp=self.mesh.dims.sp,
            sp_rank=self.mesh.sp_rank,
        )
        PROGRESS.tokens = micro.num_tokens
        return micro

    def sum_of_sequence(self, micro: MicroBatch, values: Tensor) -> Tensor:
        """[K] -> [K]: the sum over the counted tokens of each token's sequence, also of those that
        other ranks of the sp group hold. No gradient. Collective over that group."""
        numbers = micro.put(micro.numbers)
        sums = values.new_zeros(len(micro.sequences)).index_add_(0, numbers, values)
        if self.mesh.dims.sp > 1:
            dist.all_reduce(sums, group=self.mesh.sp_group)
        return sums[numbers]


class Batchers(NamedTuple):
    """How sequences are laid out for each pass."""

    actor: Batcher
    critic: Batcher
    ref: Batcher


def make_batchers(
    config: Config, mesh: Mesh, models: Models, *, halvings: Mapping[str, int] | None = None
) -> Batchers:
    """Budgets of the updates and of the forward-only pass of the reference.

    halvings: how often the one of a model (actor, critic) has been halved already.
    """
    actor, critic = config.actor, config.critic
    batcher = partial(make_batcher, config, mesh)
    ref_tokens = config.ref.log_prob_max_token_len_per_gpu
    of_actor = batcher(models.actor, tokens=actor.ppo_max_token_len_per_gpu)
    batchers = Batchers(
        actor=of_actor,
        critic=batcher(
            models.critic or models.actor, tokens=critic.ppo_max_token_len_per_gpu, section=critic
        ),
        ref=of_actor
        if config.ref_is_actor
        else batcher(models.ref or models.actor, tokens=ref_tokens),
    )
    for name, number in (halvings or {}).items():
        for _ in range(number):
            getattr(batchers, name).halve(config.data.max_length)
    return batchers


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
        sequences=-(-section.ppo_mini_batch_size * config.rollout.n // dims.dp),
        padded=not packed,
        balance=config.trainer.balance_batch,
        hidden_size=model.hf_config.hidden_size,
    )
    return Batcher(mesh=mesh, budget=budget, packed=packed)
