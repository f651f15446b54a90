"""What is known against a model, by the keys of its config.json: in an engine, over sp ranks.

Owns the reasons, as the user reads them. Must not know who asks.
"""

from __future__ import annotations

from typing import Any

from ppo.model_shapes.kept import kinds_of_layers, states_of

WITHOUT_WINDOWS = frozenset(
    (
        *("mistral", "mixtral", "ministral", "ministral3", "starcoder2", "phi3", "phimoe"),
        *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "olmo3", "cohere2"),
    )
)
"""families with sliding windows that SGLang 0.5.23 runs with none, or with other ones"""
ROPE_OF_LONGEST = ("longrope", "su", "dynamic")
"""kinds of rotary embedding whose frequencies follow from the longest sequence of a batch"""
WITHOUT_OWN_HEAD = frozenset(("gemma", "gemma2", "cohere", "cohere2", "gpt2", "gpt_bigcode"))
"""families whose head is the embedding in SGLang 0.5.23 whatever the configuration says"""
WITHOUT_EXPERTS = frozenset(("llama4", "llama4_text"))
"""mixtures whose experts SGLang 0.5.23 loads in the class of the multimodal model alone"""
_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
_LONGEST = "data.max_prompt_length + the longest max_response_length (data.val_sets' too)"


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
                f"soon as one sequence is longer than {limit} tokens; let {_LONGEST} "
                f"be at most that, not {longest}"
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
    if name in WITHOUT_EXPERTS:
        return (
            f"SGLang loads the experts of {name} in the class of the multimodal model alone: use "
            "rollout.engine=torch"
        )
    if on_cpu and (lacking := _lacks_on_cpu(keys)):
        return f"SGLang on a CPU has no {lacking}, which {name} has: use rollout.engine=torch"
    return _scale_problem(keys, longest) or window_problem(config, longest)


def _lacks_on_cpu(keys: dict[str, Any]) -> str | None:
    """What SGLang 0.5.23 has kernels of for GPUs alone; None where nothing of the model."""
    if keys.get("kv_lora_rank"):
        return "latent attention"
    if states_of(keys, kinds_of_layers(keys)).layers:
        return "linear attention, Mamba or convolutions that keep a state"
    if str(keys.get("model_type")).startswith("gemma4"):
        return "attention whose layers differ in the size of their heads"
    return None


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
        f"{own} on (rope_parameters): let {_LONGEST} be at "
        f"most {min(own, theirs)}, not {longest}, or use rollout.engine=torch"
    )


def sp_problem(config: dict[str, Any]) -> str | None:
    """Why sequences cannot be cut over sp ranks; None where they can, as far as keys tell."""
    kinds = kinds_of_layers(config)
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
            f"{_LONGEST} be at most that, not {longest}, or use rollout.engine=torch"
        )
    return None
