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
STATES_PER_SEQUENCE = 5
"""of a model with linear attention or Mamba, in SGLang's pool: that of a running sequence and those
that its prefix cache takes of it and gives to others (_calculate_mamba_ratio in
srt/mem_cache/kv_cache_configurator.py; without overlapped steps 3 are enough). With fewer it runs
fewer sequences at once."""


class KVCache(NamedTuple):
    """The KV cache of one of an engine's ranks."""

    tokens: int
    bytes: int
    sequences: int
    """that the engine generates at once, at most"""
    states: int = 0
    """of SGLang's pool; its bytes are counted"""


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
    States of sequences, where a model has them, come first; the tokens take what they leave.
    """
    weights = (num_params + (tp - 1) * shape.unsplit_params) * itemsize // tp
    context = max_model_len + CONTEXT_MARGIN
    per_token, state = shape.kv_bytes_per_token(tp=tp, itemsize=itemsize), shape.states.bytes_of(tp)
    room = max(0, int(utilization * device_bytes - weights) - state)  # SGLang has one to spare
    held = max_num_seqs or held_sequences(
        room // per_token // KV_PAGE * KV_PAGE,
        context,
        state_tokens=-(-STATES_PER_SEQUENCE * state // per_token),
    )
    if on_cpu:
        held = max_num_seqs or min(held, CPU_SEQUENCES)
    states = STATES_PER_SEQUENCE * held if state else 0
    pages = max(0, room - states * state) // per_token // KV_PAGE
    if on_cpu:
        pages = min(pages, -(-held * context // KV_PAGE))
    tokens = pages * KV_PAGE
    size = tokens * per_token + (states + 1) * state
    return EngineMemory(weights, KVCache(tokens, size, held, states))


def held_sequences(tokens: int, longest: int, *, state_tokens: int = 0) -> int:
    """That an engine should have at once where its cache holds so many tokens: those of a quarter
    of the longest, as few are longer and an engine puts some back where it has admitted too many.

    state_tokens: that could lie where the states of a sequence do; room for the longest remains.
    """
    if not state_tokens:
        return min(max(4 * tokens // longest, LEAST_SEQUENCES), MOST_SEQUENCES)
    held = min(4 * tokens // (longest + 4 * state_tokens), (tokens - longest) // state_tokens)
    return min(max(held, 1), MOST_SEQUENCES)


def embedded_cache(
    sequences: int,
    *,
    longest: int,
    token_bytes: int,
    max_num_seqs: int | None,
    utilization: float,
    device_bytes: float | None,
    free_bytes: float,
    state_bytes: int = 0,
) -> KVCache:
    """The KV cache of the embedded engine: rows of `longest` tokens or a few more, and of the state
    of a sequence, as many as there are sequences and fit beside what is not free, into its share of
    the device.

    device_bytes: None = a CPU, whose memory is not the engine's alone.
    """
    most = max_num_seqs or (CPU_SEQUENCES if device_bytes is None else sequences)
    rows, columns = min(sequences, most), -(-longest // KV_BLOCK) * KV_BLOCK
    row_bytes = columns * token_bytes + state_bytes
    if device_bytes is not None:
        budget = free_bytes - (1 - utilization) * device_bytes
        rows = max(0, min(rows, int(budget // row_bytes)))
    return KVCache(rows * columns, rows * row_bytes, rows)
