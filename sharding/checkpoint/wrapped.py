"""The language model inside a multimodal checkpoint: its configuration and its names.

Owns which part of a model of text and images (Gemma 3, Qwen3.5, Mistral 3, ...) is trained here: a
causal LM of transformers, by itself, with none of the rest; and what a checkpoint of ours says of
the folder that it is from. Must not know devices, ranks or how tensors are stored.
"""

import copy
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from sharding.checkpoint.files import CheckpointError

FILE = "wrapper.json"
"""in models/NAME/ of a checkpoint that holds the language model of a multimodal folder"""

_INSIDE = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?")
# Qwen2-VL and Qwen2.5-VL are published with these names beside visual.*
_FLAT = re.compile(r"^(model\.(layers|embed_tokens|norm)|lm_head|score)\.")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

SAME_MODEL: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl_text": ("qwen2", {}),
    "qwen2_5_vl_text": ("qwen2", {}),
    "qwen3_vl_text": ("qwen3", {}),
    "qwen3_vl_moe_text": ("qwen3_moe", {"norm_topk_prob": True}),
}
"""what a language model is, of text alone, that has no causal LM of its own in transformers: its
rotary embedding has three positions a token, which are equal where there is no image"""


def text_config(whole: Any) -> Any | None:
    """transformers' configuration of the causal LM inside a multimodal one; None where it is none.

    A causal LM of this configuration gives the log-probs of the whole model for text.
    """
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    inner = getattr(whole, "text_config", None)
    if not isinstance(inner, PreTrainedConfig) or inner is whole or whole_class(whole) is None:
        return None
    kind, keys = SAME_MODEL.get(inner.model_type, (inner.model_type, {}))
    if kind not in KNOWN:
        return None
    text = copy.deepcopy(inner)
    if kind != inner.model_type:
        text = AutoConfig.for_model(kind, **_plain_rope(inner.to_dict()), **keys)
    if getattr(whole_class(whole), "_tied_weights_keys", None):
        text.tie_word_embeddings = whole.tie_word_embeddings
    for key in _TOKENS:
        if getattr(whole, key, None) is not None:
            setattr(text, key, getattr(whole, key))
    text.dtype = getattr(whole, "dtype", None) or text.dtype
    text.architectures = [KNOWN[kind]]
    return text


def whole_class(whole: Any) -> Any | None:
    """transformers' class of the whole model; None where it has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

    return MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(whole), None)


def _plain_rope(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys without what tells the three positions of a token apart."""
    rope = keys.get("rope_parameters") or {}
    plain = {k: v for k, v in rope.items() if not k.startswith("mrope")}
    plain = {k: "default" if v == "mrope" else v for k, v in plain.items()}
    left_out = ("model_type", "architectures", "rope_scaling", "transformers_version")
    kept = {key: value for key, value in keys.items() if key not in left_out}
    return kept | {"rope_parameters": plain}


def text_name(name: str) -> str | None:
    """The causal LM's name of a tensor of the whole model, in a file or in memory; None for what is
    no part of the language model."""
    inside = _INSIDE.match(name)
    if inside is None:
        return name if _FLAT.match(name) else None
    rest = name[inside.end() :]
    return rest if rest.startswith("lm_head.") else f"model.{rest}"


class Wrapper(NamedTuple):
    """The multimodal model that a language model is part of."""

    folder: str
    """where it was in training"""
    prefix: str
    """of the language model in transformers' class of the whole: model.X is PREFIX + X there"""
    override: dict[str, Any]
    """keys of the language model's configuration that training had otherwise than the folder"""

    def document(self) -> bytes:
        """Content of the file in a checkpoint."""
        return json.dumps(self._asdict(), indent=1).encode()

    def whole_name(self, name: str) -> str:
        """The name in transformers' class of the whole model."""
        return self.prefix + name.removeprefix("model.") if name.startswith("model.") else name


def read_wrapper(checkpoint: Path, model: str) -> Wrapper | None:
    """What a checkpoint says of the folder that a model is from; None where it is a causal LM's."""
    path = checkpoint / "models" / model / FILE
    if not path.is_file():
        return None
    try:
        return Wrapper(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def prefix_of(whole: Any) -> str:
    """Where the language model is in a whole model: "model.language_model." and the like.

    Raises ValueError for a model whose language model has other names than a causal LM.
    """
    embedding = "model.embed_tokens.weight"
    for name, _ in whole.named_parameters(remove_duplicate=False):
        if text_name(name) == embedding:
            return name.removesuffix("embed_tokens.weight")
    raise ValueError(f"{type(whole).__name__}: its language model has no {embedding}")
