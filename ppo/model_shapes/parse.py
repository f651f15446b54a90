"""A model's counts from the keys of its config.json.

Owns how many parameters sit where in each family. Must not know where a config.json comes from.
"""

from __future__ import annotations

from typing import Any

from ppo.model_shapes.kept import kinds_of_layers
from ppo.model_shapes.shape import AttentionShape, Linear, ModelShape

# other names of a key, of how experts are counted, and families without a gate in the MLP
_SAME_KEY = {
    **dict.fromkeys(("n_embd", "d_model"), "hidden_size"),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), "num_hidden_layers"),
    **dict.fromkeys(("n_head", "n_heads"), "num_attention_heads"),
    **dict.fromkeys(("n_inner", "ffn_dim", "ffn_hidden_size"), "intermediate_size"),
    **dict.fromkeys(("moe_k", "moe_topk"), "num_experts_per_tok"),
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SHARED = ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")
_DENSE = ("first_k_dense_replace", "moe_layer_start_index")
_UNGATED = frozenset(
    (
        *("gpt2", "gpt_bigcode", "gpt_neox", "gpt_neox_japanese", "gptj", "codegen", "opt"),
        *("bloom", "falcon", "mpt", "phi", "starcoder2", "nemotron", "apertus", "persimmon"),
        *("nanochat", "jais2"),
    )
)
# What a published config.json leaves to transformers, which is not imported here.
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
        **{"vocab_size": 262208, "tie_word_embeddings": True},
    }
}


def parse_shape(config: dict[str, Any]) -> ModelShape:
    """A shape from the keys of a Hugging Face config.json. Raises ValueError naming a missing key.

    Covers decoder-only models: Llama, Mistral, Qwen, Gemma, GLM, GPT-2 and their like, mixtures of
    experts, and DeepSeek's latent attention. Layers of several kinds count as their mean.
    """
    config = _same_keys(config)
    missing = [
        key
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        if config.get(key) is None
    ]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    attention = AttentionShape.of(config)
    model_type = config.get("model_type", "llama")
    mlp, width = _mlp(config)
    tables, of_layer = _per_layer_inputs(config)
    tied = model_type.startswith(("gemma", "gpt2", "gpt_bigcode", "opt", "bloom", "falcon", "mpt"))
    return ModelShape(
        **vars(attention),
        model_type=model_type,
        hidden_size=config["hidden_size"],
        intermediate_size=width,
        vocab_size=config["vocab_size"],
        tied=config.get("tie_word_embeddings", tied),
        layer_params=mlp + _attention(config, attention) + of_layer,
        tables=tables,
        linears=_linears(config, attention),
    )


def _same_keys(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of the language model, each under one name."""
    config = {**config, **(config.get("text_config") or {})}
    config = {_SAME_KEY.get(key, key): value for key, value in config.items()}
    config = _LEFT_OUT.get(config.get("model_type", ""), {}) | config
    if config.get("model_type") == "longcat_flash":  # two attentions and two MLPs each
        config["num_hidden_layers"] = 2 * config["num_hidden_layers"]
    if config.get("model_type") == "nemotron_h":
        config["num_hidden_layers"] = len(kinds_of_layers(config))
    return config


def _per_layer_inputs(config: dict[str, Any]) -> tuple[int, int]:
    """(parameters of the root, of each layer) for embeddings that enter every layer."""
    width, hidden = config.get("hidden_size_per_layer_input") or 0, config["hidden_size"]
    if not width:
        return 0, 0
    layers = config["num_hidden_layers"]
    rows = config.get("vocab_size_per_layer_input", config["vocab_size"])
    table = layers * width * (rows + hidden)
    table += 2 * max(config.get("altup_num_inputs", 1) - 1, 0) * hidden * hidden
    return table, 2 * hidden * (width + config.get("laurel_rank", 0)) + hidden


def _attention(config: dict[str, Any], shape: AttentionShape) -> int:
    """Projections, their biases and all norms of one layer."""
    hidden, model_type = config["hidden_size"], config.get("model_type", "")
    if model_type == "nemotron_h":
        return _nemotron_mixers(config, shape)
    four_norms = model_type.startswith(("gemma2", "gemma3", "gemma4")) or model_type == "glm4"
    norms = hidden * (4 if four_norms else 2)
    if config.get("kv_lora_rank"):
        return _latent_attention(config, shape) + norms
    query, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    if model_type.startswith("gemma4"):
        return _gemma4_attention(config, shape) + norms
    if config.get("linear_num_value_heads"):
        return _delta_attention(config, shape) + norms
    count = hidden * (2 * query + 2 * key_value)
    if model_type.startswith("qwen2") or config.get("attention_bias"):
        count += query + 2 * key_value
    if model_type.startswith(("qwen3", "gemma3")):
        count += 2 * shape.head_dim
    return count + norms


def _gemma4_attention(config: dict[str, Any], shape: AttentionShape) -> int:
    """The mean of its layers: those without a window have heads of their own, and the last ones
    take keys and values of others."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    kinds = config.get("layer_types") or ["full_attention"] * layers
    shared, total = config.get("num_kv_shared_layers") or 0, 0
    for number, kind in enumerate(kinds):
        is_full = kind == "full_attention"
        dim = (config.get("global_head_dim") if is_full else None) or shape.head_dim
        kv = (config.get("num_global_key_value_heads") if is_full else None) or shape.num_kv_heads
        total += 2 * hidden * shape.num_heads * dim + 2 * dim
        if number < layers - shared:
            total += hidden * kv * dim * (1 if is_full and config.get("attention_k_eq_v") else 2)
    return total // layers


def _delta_attention(config: dict[str, Any], shape: AttentionShape) -> int:
    """The mean of gated DeltaNet (arXiv:2412.06464) and gated attention: Qwen3-Next, Qwen3.5."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads, width = config["linear_num_value_heads"], config["linear_value_head_dim"]
    values = heads * width
    delta = hidden * (2 * keys + 3 * values + 2 * heads) + 2 * heads + width
    delta += (2 * keys + values) * (config.get("linear_conv_kernel_dim") or 4)
    query, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    full = hidden * (3 * query + 2 * key_value) + 2 * shape.head_dim
    number = kinds_of_layers(config).count("full_attention")
    return (number * full + (layers - number) * delta) // layers


def _nemotron_mixers(config: dict[str, Any], shape: AttentionShape) -> int:
    """The mean of its layers with their norms; what `_mlp` counts is 0."""
    hidden = config["hidden_size"]
    query, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    heads = config["mamba_num_heads"]
    inner, states = heads * config["mamba_head_dim"], config["n_groups"] * config["ssm_state_size"]
    mamba = hidden * (3 * inner + 2 * states + heads) + inner + 3 * heads
    mamba += (inner + 2 * states) * (config["conv_kernel"] + 1)
    experts = config.get("n_routed_experts") or 0
    moe = 2 * hidden * experts * (config.get("moe_intermediate_size") or 0) + hidden * experts
    moe += 2 * hidden * (config.get("moe_shared_expert_intermediate_size") or 0)
    sizes = {
        "linear_attention": mamba,
        "mamba": mamba,
        "full_attention": 2 * hidden * (query + key_value),
        "attention": 2 * hidden * (query + key_value),
        "mlp": 2 * hidden * config["intermediate_size"],
        "moe": moe,
    }
    kinds = kinds_of_layers(config)
    return sum(sizes[kind] + hidden for kind in kinds) // len(kinds)


def _linears(config: dict[str, Any], shape: AttentionShape) -> tuple[Linear, ...]:
    """Projections of attention and, where all tokens visit it, of the MLP."""
    hidden, heads = config["hidden_size"], shape.num_heads
    query, key_value = heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    found = [Linear("q_proj", hidden, query), Linear("o_proj", query, hidden)]
    found += [Linear(name, hidden, key_value) for name in ("k_proj", "v_proj")]
    if latent := config.get("kv_lora_rank"):
        rope, value = config["qk_rope_head_dim"], config["v_head_dim"]
        key = config["qk_nope_head_dim"] + rope
        rank = config.get("q_lora_rank")
        found = [Linear("q_proj", hidden, heads * key)]
        if rank:
            found = [Linear("q_a_proj", hidden, rank), Linear("q_b_proj", rank, heads * key)]
        found += [
            Linear("kv_a_proj_with_mqa", hidden, latent + rope),
            Linear("kv_b_proj", latent, heads * (key - rope + value)),
            Linear("o_proj", heads * value, hidden),
        ]
    width = _mlp(config)[1]
    if any(config.get(key) for key in _EXPERTS):
        width = config.get("shared_expert_intermediate_size") or 0
        number = next((config[key] for key in _SHARED if config.get(key)), 0)
        width = width or number * (config.get("moe_intermediate_size") or 0)
    gated = config.get("model_type") not in _UNGATED
    names = ("gate_proj", "up_proj") if gated else ("up_proj",)
    found += [Linear(name, hidden, width) for name in names if width]
    return (*found, *([Linear("down_proj", width, hidden)] if width else []))


def _latent_attention(config: dict[str, Any], shape: AttentionShape) -> int:
    """DeepSeek V2 and V3 (MLA, arXiv:2405.04434, section 2.1)."""
    hidden, heads, latent = config["hidden_size"], shape.num_heads, config["kv_lora_rank"]
    rope, value = config["qk_rope_head_dim"], config["v_head_dim"]
    key = config["qk_nope_head_dim"] + rope
    count = hidden * (latent + rope) + latent * heads * (key - rope + value)
    rank = config.get("q_lora_rank")
    count += rank * (hidden + heads * key) if rank else hidden * heads * key
    return count + heads * value * hidden


def _mlp(config: dict[str, Any]) -> tuple[int, int]:
    """(parameters of one layer's MLP, width that one token sees)."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    matrices = 2 if config.get("model_type") in _UNGATED else 3
    width = config.get("intermediate_size") or 4 * hidden
    if isinstance(width, list):
        width = sum(width) // len(width)
    if config.get("model_type") == "nemotron_h":
        return 0, width  # some layers have one: `_nemotron_mixers`
    experts = next((config[key] for key in _EXPERTS if config.get(key)), 0)
    if not experts:
        return matrices * hidden * width, width
    each = config.get("moe_intermediate_size") or config.get("expert_ffn_hidden_size") or width
    gated = config.get("shared_expert_intermediate_size") or 0
    shared = gated or each * next((config[key] for key in _SHARED if config.get(key)), 0)
    count = matrices * hidden * (experts * each + shared) + experts * hidden
    count += hidden if gated else 0
    if config.get("model_type") == "longcat_flash":  # experts beside every second MLP
        count += hidden * config.get("zero_expert_num", 0)
        return matrices * hidden * width + count // 2, width
    if config.get("enable_moe_block"):  # Gemma 4: both
        count += matrices * hidden * width
    dense = min(next((config[key] for key in _DENSE if config.get(key)), 0), layers)
    count = (dense * matrices * hidden * width + (layers - dense) * count) // layers
    return count, config.get("num_experts_per_tok", 2) * each + shared
