"""Attention heads of a model, from its Hugging Face configuration.

Owns which keys say how many there are and how wide: what layouts, caches and costs are computed
from. Must not know what they are used for. No torch.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Heads(NamedTuple):
    """Attention heads of every layer, before any split over ranks."""

    query: int
    kv: int
    """key-value heads: as many as `query`, or fewer that share"""
    dim: int
    """numbers of one head"""

    @classmethod
    def of(cls, config: Any) -> "Heads":
        """From the keys of a config.json, or transformers' configuration; of the text model.

        A model without attention (Mamba, xLSTM) counts as one head of its whole width.
        """
        query, kv, dim = (
            text_value(config, name)
            for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        query = query or 1
        return cls(query, kv or query, dim or text_value(config, "hidden_size") // query)


def text_value(config: Any, name: str) -> Any:
    """A value of the text model's configuration (see `Heads.of`), None where there is none; the
    largest where layers differ (Gemma 4)."""
    if isinstance(config, Mapping):
        return {**config, **(config.get("text_config") or {})}.get(name)
    text = config.get_text_config()
    try:
        return getattr(text, name, None)
    except RuntimeError:  # transformers' way to say that it is another one in each layer
        found = [getattr(layer, name) for layer in text.per_layer_config]
        return max((value for value in found if value is not None), default=None)
