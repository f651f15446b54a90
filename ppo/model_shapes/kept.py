"""What tokens and sequences leave in the memory of an engine, from a model's configuration.

Owns which layers keep keys and values, a latent, or a state. Must not know how an engine lays them
out, or how many sequences it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sharding.heads import text_value

_STATEFUL = frozenset(("linear_attention", "mamba", "conv", "hybrid"))
_WITHOUT_TOKENS = frozenset(("linear_attention", "mamba", "conv", "recurrent", "mlp", "moe"))
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


class States(NamedTuple):
    """What layers that carry a state from token to token keep of one sequence."""

    layers: int
    """that keep one"""
    conv: int
    """numbers of a layer: the last inputs of its convolution, two bytes each"""
    recurrent: int
    """numbers of a layer: its state"""
    itemsize: int
    """bytes of each of them"""

    def bytes_of(self, tp: int) -> int:
        """Of one sequence on one of `tp` ranks, which split heads and channels."""
        return self.layers * (2 * -(-self.conv // tp) + self.itemsize * -(-self.recurrent // tp))


STATELESS = States(0, 0, 0, 0)


def kinds_of_layers(config: Any) -> list[str]:
    """What each layer is, as transformers names it; none where all are the same.

    config: the keys of a config.json, or transformers' configuration; of the text model.
    """
    if text_value(config, "model_type") == "nemotron_h":
        pattern = text_value(config, "hybrid_override_pattern") or ""
        if found := [_LETTERS[letter] for letter in pattern]:
            return found
    for name in ("layer_types", "layers_block_type"):
        if kinds := text_value(config, name):
            return list(kinds)
    number, every = (
        text_value(config, name) for name in ("num_hidden_layers", "full_attention_interval")
    )
    if text_value(config, "linear_num_value_heads"):  # Qwen3-Next, as it is published
        every = every or 4
        return ["linear_attention" if n % every else "full_attention" for n in range(1, number + 1)]
    linear = text_value(config, "linear_attn_config") or {}
    if full := linear.get("full_attn_layers"):  # Kimi Linear, counted from 1
        return ["full_attention" if n in full else "linear_attention" for n in range(1, number + 1)]
    return []


def layers_with_tokens(config: Any, kinds: Sequence[str]) -> int:
    """How many layers keep something of every token."""
    number = sum(kind not in _WITHOUT_TOKENS for kind in kinds)
    return number or text_value(config, "num_hidden_layers")


def latent_of(config: Any) -> int:
    """Numbers that a token leaves in a layer of latent attention, which all heads share (MLA,
    arXiv:2405.04434, section 2.1); 0 = it leaves keys and values of heads.

    With the keys of an index over tokens (DeepSeek V3.2), which SGLang stores in fewer bytes.
    """
    latent, rope, index = (
        text_value(config, name) or 0
        for name in ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim")
    )
    return latent + rope + index if latent else 0


def states_of(config: Any, kinds: Sequence[str]) -> States:
    """By the formulas of SGLang's configurations (srt/configs/), whose pool of states it sizes."""

    def get(name: str) -> Any:
        return text_value(config, name) or 0

    layers = sum(kind in _STATEFUL for kind in kinds)
    kimi = get("linear_attn_config") or {
        "num_heads": get("linear_num_heads"),
        "head_dim": get("linear_head_dim"),
        "short_conv_kernel_size": get("linear_conv_kernel_dim"),
    }
    if heads := get("linear_num_value_heads"):  # gated DeltaNet
        inner, state = heads * get("linear_value_head_dim"), get("linear_key_head_dim")
        groups, kernel = get("linear_num_key_heads"), get("linear_conv_kernel_dim") or 4
    elif heads := get("mamba_num_heads"):  # Nemotron-H
        inner, state = heads * get("mamba_head_dim"), get("ssm_state_size")
        groups, kernel = get("n_groups"), get("conv_kernel")
    elif heads := get("mamba_n_heads"):  # Granite 4, and Falcon-H1, whose layers are both
        dim = get("mamba_d_head")
        inner = heads * dim if isinstance(dim, int) else get("mamba_expand") * get("hidden_size")
        state, groups, kernel = get("mamba_d_state"), get("mamba_n_groups"), get("mamba_d_conv")
        layers = layers or get("num_hidden_layers")
    elif heads := kimi.get("num_heads"):  # Kimi Linear: keys, queries and values of one width
        inner, state = heads * kimi["head_dim"], kimi["head_dim"]
        groups, kernel = heads, kimi["short_conv_kernel_size"]
    elif kernel := get("conv_L_cache"):  # LFM2: a convolution alone
        inner, state, groups = get("hidden_size"), 0, 0
    else:
        return STATELESS
    short = get("mamba_ssm_dtype") in ("bfloat16", "float16")
    conv = (inner + 2 * groups * state) * (kernel - 1)
    return States(layers, conv, inner * state, 2 if short else 4)
