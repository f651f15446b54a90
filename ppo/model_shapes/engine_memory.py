"""What an engine's weights and KV cache take, so that `--check` and the engines have one rule.

Owns the sizes of caches. Must not know how an engine is built.
"""

from __future__ import annotations

from typing import NamedTuple

from ppo.model_shapes.shape import AttentionShape

# SGLang counts its last token and a reserve into the context; prompt + response never exceed
# rollout.max_model_len.
CONTEXT_MARGIN = 8
KV_PAGE = 256  # a multiple of every page size of SGLang's attention backends
KV_BLOCK = 64  # of columns of the embedded engine: few mask shapes, and cheap to clear
# Sequences that an engine generates at once where rollout.max_num_seqs does not say: on a CPU; on a
# device at least, and at most (SGLang's own bounds of its table of requests end there).
CPU_SEQUENCES, LEAST_SEQUENCES, MOST_SEQUENCES = 256, 256, 4096


class KVCache(NamedTuple):
    """The KV cache of one of an engine's ranks."""

    tokens: int
    bytes: int
    sequences: int
    """that the engine generates at once, at most"""


class EngineMemory(NamedTuple):
    """What an engine takes of one of its devices when it is awake."""

    weight_bytes: int
    cache: KVCache


def sglang_memory(
    shape: AttentionShape,
    *,
    num_params: int,
    itemsize: int,
    tp: int,
    device_bytes: float,
    utilization: float,
    max_model_len: int,
    max_num_seqs: int | None,
    on_cpu: bool,
) -> EngineMemory:
    """Weights and KV cache of one of SGLang's `tp` ranks: what its share of a device leaves.

    On a CPU, where the memory is not the engine's alone, the cache is no larger than `max_num_seqs`
    sequences can fill. It is of use when it holds one sequence of `max_model_len` + CONTEXT_MARGIN.
    """
    weights, context = num_params * itemsize // tp, max_model_len + CONTEXT_MARGIN
    per_token = shape.kv_bytes_per_token(tp=tp, itemsize=itemsize)
    pages = max(0, int(utilization * device_bytes - weights)) // per_token // KV_PAGE
    if on_cpu:
        pages = min(pages, -(-(max_num_seqs or CPU_SEQUENCES) * context // KV_PAGE))
    tokens = pages * KV_PAGE
    held = CPU_SEQUENCES if on_cpu else held_sequences(tokens, context)
    return EngineMemory(weights, KVCache(tokens, tokens * per_token, max_num_seqs or held))


def held_sequences(tokens: int, longest: int) -> int:
    """That an engine should have at once where its cache holds so many tokens: those of a quarter
    of the longest, as few are longer and an engine puts some back where it has admitted too many.
    """
    return min(max(4 * tokens // longest, LEAST_SEQUENCES), MOST_SEQUENCES)


def embedded_cache(
    sequences: int,
    *,
    longest: int,
    token_bytes: int,
    max_num_seqs: int | None,
    utilization: float,
    device_bytes: float | None,
    free_bytes: float,
) -> KVCache:
    """The KV cache of the embedded engine: rows of `longest` tokens or a few more, as many as there
    are sequences and fit beside what is not free, into its share of the device.

    device_bytes: None = a CPU, whose memory is not the engine's alone.
    """
    most = max_num_seqs or (CPU_SEQUENCES if device_bytes is None else sequences)
    rows, columns = min(sequences, most), -(-longest // KV_BLOCK) * KV_BLOCK
    if device_bytes is not None:
        budget = free_bytes - (1 - utilization) * device_bytes
        rows = max(0, min(rows, int(budget // (columns * token_bytes))))
    return KVCache(rows * columns, rows * columns * token_bytes, rows)
