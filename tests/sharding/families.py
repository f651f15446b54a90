"""Small models of every family in the layout tables, and layouts applied to full tensors."""

import copy

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from sharding.layout import FAMILIES, Layout, view_2d

Tensors = dict[str, Tensor]

SHAPES = {
    "more kv heads than ranks": {"num_attention_heads": 16, "num_key_value_heads": 8},
    "kv heads on several ranks": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "one kv head": {"num_attention_heads": 8, "num_key_value_heads": 1},
}
VOCABULARIES = (97, 128, 257)
"""a prime below one padded block per rank, an even one, one over a multiple of 64"""

FAMILY_NAMES = sorted(FAMILIES)


def small_config(family: str, **changes) -> PretrainedConfig:
    values = {
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "head_dim": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 97,
        "tie_word_embeddings": False,
        **changes,
    }
    if family in ("llama", "qwen3", "gemma2", "gemma3_text"):
        values.setdefault("attention_bias", True)
    if family == "qwen2":
        del values["head_dim"]  # hidden_size / num_attention_heads
    return AutoConfig.for_model(family, **values)


def full_parameters(config: PretrainedConfig) -> Tensors:
    """Every parameter under its Hugging Face name, with random values."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def apply_layout(layout: Layout, full: Tensors) -> Tensors:
    """The engine's parameters [rows, cols]; NaN where the layout writes nothing."""
    out = {name: torch.full(size, float("nan")) for name, size in layout.targets.items()}
    for r in layout.regions:
        source = full[r.source].view(view_2d(full[r.source].shape))
        block = source[r.src_row : r.src_row + r.rows, r.src_col : r.src_col + r.cols]
        out[r.target][r.dst_row : r.dst_row + r.rows, r.dst_col : r.dst_col + r.cols] = block
    for zero in layout.zeros:
        rows, cols = slice(zero.row, zero.row + zero.rows), slice(zero.col, zero.col + zero.cols)
        out[zero.target][rows, cols] = 0
    return out
