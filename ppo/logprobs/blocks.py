"""Blocks of logits: how large they are, and what they are computed from.

The head is walked in blocks of the vocabulary, so that the largest tensor beside the weight and its
gradient is one block; another model's head is walked beside it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Elements of one block of logits. On a CPU a block should stay in the last-level cache; on an
# accelerator it should be large enough to keep the matrix units busy (float32: 256 MiB).
CPU_BLOCK_ELEMENTS = 1 << 21
DEVICE_BLOCK_ELEMENTS = 1 << 26
# Rows are cut only beyond this, because every further cut reads the whole head again.
MAX_BLOCK_ROWS = 8192
MIN_BLOCK_COLUMNS = 128


class LogitTransform(NamedTuple):
    """How a model's logits follow from hidden x head: z = softcap(scale * x)."""

    scale: float = 1.0
    softcap: float | None = None
    """c of z = c * tanh(x / c) (Gemma 2), or None."""

    def __call__(self, product: Tensor) -> Tensor:
        """Logits z for products x of hidden states and head, of any shape."""
        if self.softcap is None:
            return self.scale * product
        return self.softcap * torch.tanh(product * (self.scale / self.softcap))


@dataclass(frozen=True, eq=False, kw_only=True)
class Reference:
    """Another model's distributions of the same tokens, from its own head; no gradient.

    No tuple: FSDP would cast the tensors in it to the actor's dtype.
    """

    hidden: Tensor
    """[K, H'], its last hidden states"""
    weight: Tensor
    """[V', H'], its head"""
    transform: LogitTransform
    is_forward: bool
    """KL(reference, policy); else KL(policy, reference)"""


class Options(NamedTuple):
    transform: LogitTransform
    temperature: float
    with_entropy: bool
    block_elements: int
    num_ids: int
    """rows of the head that count, from 0 on"""
    reference: Reference | None


def row_slices(num_rows: int) -> list[slice]:
    """Slices of at most MAX_BLOCK_ROWS rows; one empty slice when there are none."""
    starts = range(0, max(num_rows, 1), MAX_BLOCK_ROWS)
    return [slice(start, min(start + MAX_BLOCK_ROWS, num_rows)) for start in starts]


def column_slices(num_rows: int, num_columns: int, block_elements: int) -> Iterator[slice]:
    width = max(block_elements // max(num_rows, 1), MIN_BLOCK_COLUMNS)
    for start in range(0, num_columns, width):
        yield slice(start, min(start + width, num_columns))


def statistics_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the statistics dtype. CUDA's matrix units add up in float32 anyway: keep that."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).to(statistics_dtype(a))


def block_logits(
    hidden: Tensor, weight: Tensor, transform: LogitTransform, temperature: float
) -> Tensor:
    """u = transform(hidden @ weight.T) / temperature, new, [R, C], statistics dtype."""
    u = product(hidden, weight.t())
    scale, softcap = transform
    if softcap is not None:
        return u.mul_(scale / softcap).tanh_().mul_(softcap / temperature)
    return u if scale == temperature else u.mul_(scale / temperature)


def reference_logits(options: Options, rows: slice, columns: slice, like: Tensor) -> Tensor:
    """v of the reference, [R, C], in the dtype of the block that it is compared with."""
    reference = options.reference
    assert reference is not None
    v = block_logits(
        reference.hidden[rows],
        reference.weight[columns],
        reference.transform,
        options.temperature,
    )
    return v.to(like.dtype)


def label_columns(labels: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Column of each label in the block, clamped into it [R, 1], and whether it lies there [R]."""
    inside = (labels >= columns.start) & (labels < columns.stop)
    return (labels - columns.start).clamp(0, columns.stop - columns.start - 1)[:, None], inside
