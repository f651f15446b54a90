"""Sizes of a model without loading it. Must not import torch or transformers: `--check` runs in
seconds and needs no weights."""

from ppo.model_shapes.engine_memory import (
    CONTEXT_MARGIN,
    CPU_SEQUENCES,
    KV_BLOCK,
    KV_PAGE,
    MOST_SEQUENCES,
    STATES_PER_SEQUENCE,
    EngineMemory,
    KVCache,
    embedded_cache,
    held_sequences,
    sglang_memory,
)
from ppo.model_shapes.find import (
    SHAPES_FILE,
    TINY,
    UNREADABLE,
    config_json,
    file_of_model,
    find_shape,
)
from ppo.model_shapes.parse import parse_shape
from ppo.model_shapes.problems import rope_problem, sglang_problem, sp_problem
from ppo.model_shapes.shape import AttentionShape, LoraSize, ModelShape

__all__ = [
    "CONTEXT_MARGIN",
    "CPU_SEQUENCES",
    "KV_BLOCK",
    "KV_PAGE",
    "MOST_SEQUENCES",
    "SHAPES_FILE",
    "STATES_PER_SEQUENCE",
    "TINY",
    "UNREADABLE",
    "AttentionShape",
    "EngineMemory",
    "KVCache",
    "LoraSize",
    "ModelShape",
    "config_json",
    "embedded_cache",
    "file_of_model",
    "find_shape",
    "held_sequences",
    "parse_shape",
    "rope_problem",
    "sglang_memory",
    "sglang_problem",
    "sp_problem",
]
