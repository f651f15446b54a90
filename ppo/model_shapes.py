"""Sizes of a model without loading it: from its config.json, the Hub cache, or a table.

Owns how many parameters sit where, and what an engine's weights and KV cache take, so that
`--check` and the engines have one rule. Must not import torch or transformers: `--check` runs in
seconds and needs no weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sharding.heads import Heads, text_value

SHAPES_FILE = Path(__file__).resolve().parents[1] / "configs" / "model_shapes.yaml"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SUFFIXES = ("-instruct", "-it", "-pt", "-base", "-chat")

# what ppo/models/tiny.py builds, with torch: a test compares
TINY: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}


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

WITHOUT_WINDOWS = frozenset(
    (
        *("mistral", "mixtral", "ministral", "ministral3", "starcoder2", "phi3", "phimoe"),
        *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "olmo3", "cohere2"),
    )
)
"""families with sliding windows that SGLang 0.5.23 runs with none, or with other ones"""
ROPE_OF_LONGEST = ("longrope", "su", "dynamic")
"""kinds of rotary embedding whose frequencies follow from the longest sequence of a batch"""

# What a published config.json leaves to transformers, which is not imported here.
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
        **{"vocab_size": 262208, "tie_word_embeddings": True},
    }
}
WITHOUT_OWN_HEAD = frozenset(("gemma", "gemma2", "cohere", "cohere2", "gpt2", "gpt_bigcode"))
"""families whose head is the embedding in SGLang 0.5.23 whatever the configuration says"""
_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}

UNREADABLE = (ValueError, TypeError, ArithmeticError, AttributeError, RecursionError)
"""what a config.json raises that is none of a model"""

# SGLang counts its last token and a reserve into the context; prompt + response never exceed
# rollout.max_model_len.
CONTEXT_MARGIN = 8
KV_PAGE = 256  # a multiple of every page size of SGLang's attention backends
KV_BLOCK = 64  # of columns of the embedded engine: few mask shapes, and cheap to clear
# Sequences that an engine generates at once where rollout.max_num_seqs does not say: on a CPU; on a
# device at least, and at most (SGLang's own bounds of its table of requests end there).
CPU_SEQUENCES, LEAST_SEQUENCES, MOST_SEQUENCES = 256, 256, 4096


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Layers and heads: what a token costs in attention, and leaves in a KV cache."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> AttentionShape:
        """Of any decoder, from the keys of a config.json or transformers' configuration."""
        heads = Heads.of(config)
        return cls(
            num_layers=text_value(config, "num_hidden_layers"),
            num_heads=heads.query,
            num_kv_heads=heads.kv,
            head_dim=heads.dim,
        )

    def kv_bytes_per_token(self, *, tp: int, itemsize: int) -> int:
        """Bytes that one token takes in the KV cache of one of `tp` ranks.

        Keys and values of every layer; a rank holds its share of the kv heads, or one that others
        hold too.
        """
        return 2 * self.num_layers * -(-self.num_kv_heads // tp) * self.head_dim * itemsize


class Linear(NamedTuple):
    """One linear layer of a transformer layer, by the last part of its name."""

    name: str
    inputs: int
    outputs: int


class LoraSize(NamedTuple):
    """Parameters of the adapters of one transformer layer: A [rank, inputs], B [outputs, rank]."""

    low: int
    up: int


@dataclass(frozen=True, kw_only=True)
class ModelShape(AttentionShape):
    """What memory and mesh degrees depend on. Counts are of parameters unless a name says else."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    """width of the MLP; of a mixture of experts, of all experts that a token visits"""
    vocab_size: int
    tied: bool
    """the output head is the embedding"""
    layer_params: int
    """of one transformer layer"""
    tables: int = 0
    """of embeddings for each layer, and what projects them (Gemma 3n, Gemma 4)"""
    linears: tuple[Linear, ...] = ()
    """of one transformer layer, without the experts of a mixture, as Llama names them"""

    def lora_size(self, rank: int, targets: Sequence[str], excluded: Sequence[str]) -> LoraSize:
        """Of adapters on the layers that are named; all of them where a name is not known here."""
        names = {name.rpartition(".")[2] for name in targets}
        left_out = {name.rpartition(".")[2] for name in excluded}
        known = {layer.name for layer in self.linears}
        chosen = [
            layer
            for layer in self.linears
            if (layer.name in names or names - known) and layer.name not in left_out
        ]
        inputs, outputs = sum(c.inputs for c in chosen), sum(c.outputs for c in chosen)
        return LoraSize(rank * inputs, rank * outputs)

    @property
    def embedding_params(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def root_params(self) -> int:
        """FSDP's root group of a causal LM: embedding, last norm, head."""
        own = self.embedding_params * (1 if self.tied else 2) + self.hidden_size
        return own + self.tables

    @property
    def value_root_params(self) -> int:
        """The same of a value model: embedding, last norm, value head."""
        return self.embedding_params + 2 * self.hidden_size + self.tables

    @property
    def degrees(self) -> list[int]:
        """Of sp or tensor parallelism: heads are split, kv heads are split or repeated."""
        heads, kv = self.num_heads, self.num_kv_heads
        return [d for d in range(1, heads + 1) if heads % d == 0 and (kv % d == 0 or d % kv == 0)]

    @property
    def num_params(self) -> int:
        """Of the causal LM."""
        return self.num_layers * self.layer_params + self.root_params


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


def find_shape(path: str, file: Path | None = None) -> tuple[ModelShape, str] | None:
    """The shape of `model.path` and where it was found; None if nowhere.

    Looks at `file`, a config.json that is given for it, else at `tiny`, the folder's config.json,
    the Hugging Face cache, and by the last part of the path at configs/model_shapes.yaml. Raises
    ValueError for a config.json that is none of a model.
    """
    if path == "tiny" and file is None:
        return parse_shape(TINY), "built in"
    found = file or config_json(path)
    if found is not None:
        try:
            return parse_shape(json.loads(found.read_text(encoding="utf-8"))), str(found)
        except UNREADABLE as error:
            raise ValueError(f"{found} does not describe a language model: {error}") from error
    table = _published()
    if path in table:
        return parse_shape(table[path]), f"configs/{SHAPES_FILE.name}"
    for name, config in table.items():
        if _last_part(name) == _last_part(path):
            return parse_shape(config), f"configs/{SHAPES_FILE.name}, as {name}"
    return None


@cache
def _published() -> dict[str, dict[str, Any]]:
    """The models of configs/model_shapes.yaml."""
    return yaml.load(SHAPES_FILE.read_bytes(), Loader=_LOADER)


def _last_part(path: str) -> str:
    """The name of a model, without its organisation or folder and without "-Instruct"."""
    name = path.rstrip("/").rpartition("/")[2].lower()
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def config_json(path: str) -> Path | None:
    """The config.json of a folder or of a repository in the Hugging Face cache."""
    return file_of_model(path, "config.json")


def file_of_model(path: str, name: str) -> Path | None:
    """A file of a folder or of a repository in the Hugging Face cache; None where it is not."""
    if Path(path).is_dir():
        file = Path(path) / name
        return file if file.is_file() else None
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        return None
    from huggingface_hub import try_to_load_from_cache  # half a second, only for Hub names
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path, name)
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


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
    if kinds := _kinds_of_nemotron(config):
        config["num_hidden_layers"] = len(kinds)
    return config


def _kinds_of_nemotron(config: dict[str, Any]) -> list[str]:
    """Of a Nemotron-H, whose layers are one thing each: what each one is."""
    if config.get("model_type") != "nemotron_h":
        return []
    letters = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    pattern = [letters[letter] for letter in config.get("hybrid_override_pattern") or ""]
    return pattern or config.get("layers_block_type") or config.get("layer_types") or []


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


def rope_problem(config: dict[str, Any], longest: int) -> str | None:
    """Why sequences of up to `longest` tokens are not the same in this model whatever is beside
    them; None where they are.

    config: the keys of a config.json. Some kinds of rotary embedding take the frequencies of every
    token from the longest sequence of the batch: a packed row, a padded one and the batches of an
    engine would all differ.
    """
    config = {**config, **(config.get("text_config") or {})}
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for kind in [r for r in rope.values() if isinstance(r, dict)] or [rope]:
        name = kind.get("rope_type", kind.get("type"))
        limit = kind.get("original_max_position_embeddings")
        limit = limit or config.get("original_max_position_embeddings")
        limit = limit or config.get("max_position_embeddings")
        if name in ROPE_OF_LONGEST and limit is not None and longest > limit:
            return (
                f"its rotary embedding ({name}) gives all tokens of a batch other frequencies as "
                f"soon as one sequence is longer than {limit} tokens; let data.max_prompt_length + "
                f"data.max_response_length be at most that, not {longest}"
            )
    return None


def sglang_problem(config: dict[str, Any], longest: int, *, on_cpu: bool) -> str | None:
    """Why SGLang would generate from another distribution than the model's, or not at all; None
    where nothing is known against it.

    config, longest: as `rope_problem`.
    """
    keys = {**config, **(config.get("text_config") or {})}
    name = keys.get("model_type")
    if name in WITHOUT_OWN_HEAD and keys.get("tie_word_embeddings") is False:
        return (
            f"SGLang has no head of {name} beside its embedding, and this model's are not tied "
            "(tie_word_embeddings): use rollout.engine=torch"
        )
    if on_cpu and keys.get("kv_lora_rank"):
        return (
            f"SGLang's attention on a CPU has no latent attention, which {name} has "
            "(kv_lora_rank): use rollout.engine=torch"
        )
    return _scale_problem(keys, longest) or window_problem(config, longest)


def _scale_problem(keys: dict[str, Any], longest: int) -> str | None:
    """Queries of Ministral 3 grow with the position; SGLang reads the step of that elsewhere."""
    rope = keys.get("rope_parameters") or {}
    own = rope.get("original_max_position_embeddings")
    theirs = keys.get("original_max_position_embeddings") or 16384
    if keys.get("model_type") != "ministral3" or not rope.get("llama_4_scaling_beta") or not own:
        return None
    if own == theirs or longest <= min(own, theirs):
        return None
    return (
        f"SGLang scales the queries of ministral3 from position {theirs} on, this model from "
        f"{own} on (rope_parameters): let data.max_prompt_length + data.max_response_length be at "
        f"most {min(own, theirs)}, not {longest}, or use rollout.engine=torch"
    )


def sp_problem(config: dict[str, Any]) -> str | None:
    """Why sequences cannot be cut over sp ranks; None where they can, as far as keys tell."""
    keys = {**config, **(config.get("text_config") or {})}
    kinds = keys.get("layer_types") or _kinds_of_nemotron(keys)
    other = sorted({kind for kind in kinds if isinstance(kind, str)} - _PACKABLE_LAYERS)
    return f"it has layers of type {', '.join(other)}" if other else None


def window_problem(config: dict[str, Any], longest: int) -> str | None:
    """Why SGLang would generate from another distribution than the model's; None where it does not.

    config, longest: as `rope_problem`.
    """
    config = {**config, **(config.get("text_config") or {})}
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    has_windows = config.get("use_sliding_window", True) and (
        kinds is None or "sliding_attention" in kinds
    )
    name = config.get("model_type")
    if name in WITHOUT_WINDOWS and has_windows and window is not None and longest > window:
        return (
            f"SGLang does not have the attention windows of {name} ({window} tokens): let "
            f"data.max_prompt_length + data.max_response_length be at most that, not {longest}, "
            "or use rollout.engine=torch"
        )
    return None


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
    kinds, every = config.get("layer_types"), config.get("full_attention_interval") or 4
    number = kinds.count("full_attention") if kinds else layers // every
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
    kinds = _kinds_of_nemotron(config)
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
