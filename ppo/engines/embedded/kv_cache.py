"""Keys and values of the running rows of the embedded engine, and attention over them.

Owns preallocated buffers per layer, [rows, kv heads, columns, head dim], where column = position: a
row writes its next token at its own position, so rows of any length share a batch without padding
on the left. Must not know tokens, requests or when rows come and go.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ppo.model_shapes import KV_BLOCK
from sharding.offload import to_device


class Step:
    """What one forward needs to know of the batch; each mask is made once for all layers."""

    def __init__(self, positions: Tensor, columns: int, *, prefill: bool):
        """positions [R or 1, q] int64 of the tokens in this forward; columns: those it reads."""
        self.positions = positions
        self.columns = columns
        self.prefill = prefill
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[R or 1, 1, q, columns]: 0 where a token may look, -inf elsewhere."""
        if (window, dtype) not in self._masks:
            column = torch.arange(self.columns, device=self.positions.device)
            position = self.positions[:, None, :, None]  # [R, 1, q, 1]
            hidden = column > position
            if window is not None:
                hidden |= column <= position - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[window, dtype] = mask.masked_fill_(hidden, -torch.inf)
        return self._masks[window, dtype]


class KVCache(Cache):
    """Buffers for `rows` sequences of up to `columns` tokens, taken layer by layer at first use."""

    def __init__(self, *, rows: int, columns: int):
        super().__init__(layers=[])
        self.rows = rows
        self.columns = -(-columns // KV_BLOCK) * KV_BLOCK
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._cleared = 0
        self._running = 0
        self._targets: tuple[Tensor, Tensor] | None = None
        self._step: Step | None = None

    def prefill(self, lengths: Sequence[int], copies: Sequence[int], device: torch.device) -> Step:
        """Starts rows: prompts of `lengths`, right-padded to the longest, with `copies` rows each.

        The new rows follow the running ones, the copies of one prompt side by side.
        """
        longest = max(lengths)
        source = torch.arange(len(copies)).repeat_interleave(torch.tensor(copies))
        first = self._running
        self._running += len(source)
        assert self._running <= self.rows and longest <= self.columns
        rows = torch.arange(first, self._running)
        self._targets = (to_device(rows, device), to_device(source, device))
        self._clear(longest)
        self._step = Step(torch.arange(longest, device=device)[None], longest, prefill=True)
        return self._step

    def decode(self, positions: Tensor, longest: int) -> Step:
        """One more token for every running row, at positions [R]; `longest` = 1 + their maximum."""
        assert len(positions) == self._running and longest <= self.columns
        columns = min(-(-longest // KV_BLOCK) * KV_BLOCK, self.columns)
        self._targets = (torch.arange(self._running, device=positions.device), positions)
        self._clear(columns)
        self._step = Step(positions[:, None], columns, prefill=False)
        return self._step

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Drops all rows but `rows`; returns the old row of each new row.

        Rows from the end fill the holes, so that the running rows stay a prefix of the buffers.
        """
        kept = set(rows)
        count = len(kept)
        holes = [row for row in range(count) if row not in kept]
        movers = sorted(row for row in kept if row >= count)
        order = list(range(count))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        if holes:
            self._move(torch.tensor(movers), torch.tensor(holes))
        self._running = count
        return order

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes [R, kv heads, q, head dim] in place; returns what this forward attends to."""
        assert self._step is not None and self._targets is not None
        if layer_idx not in self._keys:
            for buffers, states in ((self._keys, key_states), (self._values, value_states)):
                _, heads, _, dim = states.shape
                buffers[layer_idx] = states.new_empty(self.rows, heads, self.columns, dim)
                buffers[layer_idx][:, :, : self._cleared] = 0
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        rows, index = self._targets
        if self._step.prefill:
            columns = self._step.columns
            keys[rows, :, :columns] = key_states[index]
            values[rows, :, :columns] = value_states[index]
            return key_states, value_states
        keys[rows, :, index] = key_states[:, :, 0]
        values[rows, :, index] = value_states[:, :, 0]
        visible = (slice(self._running), slice(None), slice(self._step.columns))
        return keys[visible], values[visible]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0 until the first token: HF asks only whether anything is cached."""
        return self._step.columns if self._step is not None and not self._step.prefill else 0

    def free(self) -> None:
        """Gives the buffers back."""
        self._keys.clear()
        self._values.clear()
        self._step = self._targets = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        tensors = [*self._keys.values(), *self._values.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _move(self, sources: Tensor, targets: Tensor) -> None:
        for buffers in (self._keys, self._values):
            for buffer in buffers.values():
                visible = buffer[:, :, : self._cleared]
                visible[to_device(targets, buffer.device)] = visible[
                    to_device(sources, buffer.device)
                ]

    def _clear(self, columns: int) -> None:
        """Zeroes columns that become visible for the first time: masked garbage may be NaN."""
        columns = min(-(-columns // KV_BLOCK) * KV_BLOCK, self.columns)
        if columns > self._cleared:
            for buffers in (self._keys, self._values):
                for buffer in buffers.values():
                    buffer[:, :, self._cleared : columns] = 0
            self._cleared = columns


def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    kv_step: Step,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of query [R, heads, q, d] over key and value [R, kv heads, columns, d].

    Signature and result [R, q, heads, d] are those of transformers' AttentionInterface. The heads
    that share a kv head are stacked along the query dim: keys and values are read where they lie.
    """
    rows, heads, length, dim = query.shape
    groups = heads // key.shape[1]
    by_kernel = softcap is None and s_aux is None
    if kv_step.prefill and by_kernel and (sliding_window or length) >= length:
        output = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1
        )
        return output.transpose(1, 2).contiguous(), None
    stacked = query.reshape(rows, key.shape[1], groups * length, dim)
    mask = kv_step.mask(sliding_window, query.dtype)  # [R, 1, q, columns]
    if length > 1:
        mask = mask.repeat(1, 1, groups, 1)  # [R, 1, groups * q, columns]
    if by_kernel:
        output = F.scaled_dot_product_attention(
            stacked, key, value, attn_mask=mask.expand(-1, -1, stacked.shape[2], -1), scale=scaling
        )
    else:
        sinks = s_aux
        if sinks is not None:  # [kv heads, groups * q, 1]
            sinks = sinks.view(-1, groups, 1).repeat_interleave(length, 1)
        scores = (stacked @ key.transpose(2, 3)).float() * scaling
        output = _weights(scores, mask, softcap=softcap, sinks=sinks).to(query.dtype) @ value
    output = output.reshape(rows, heads, length, value.shape[-1])
    return output.transpose(1, 2).contiguous(), None


def _weights(
    scores: Tensor, mask: Tensor, *, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Softmax of float32 scores [R, kv heads, n, columns], limited to softcap * tanh(score /
    softcap) (Gemma 2), with a sink [kv heads, n, 1] as one more score that has no value (gpt-oss).
    """
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores + mask.float()
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], -1).softmax(-1)[
        ..., :-1
    ]
