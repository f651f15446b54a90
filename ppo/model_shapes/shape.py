"""What a model's memory and mesh degrees depend on, counted.

Owns the counts and what follows from them alone. Must not know the families.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ppo.model_shapes.kept import (
    STATELESS,
    States,
    kinds_of_layers,
    latent_of,
    layers_with_tokens,
    states_of,
)
from sharding.heads import Heads, text_value
from sharding.layout import FAMILIES


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Layers and heads: what a token costs in attention, and leaves in a KV cache; what a sequence
    leaves beside it."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """numbers of one head; where keys and values differ, their mean"""
    layers_with_tokens: int
    """those that keep something of every token"""
    latent: int = 0
    """numbers of a token that all heads of a layer share; 0 = each has keys and values"""
    states: States = STATELESS
    unsplit_params: int = 0
    """of the embedding, where each of SGLang's ranks has all of it"""

    @classmethod
    def of(cls, config: Any) -> AttentionShape:
        """Of any decoder, from the keys of a config.json or transformers' configuration."""
        heads, kinds, latent = Heads.of(config), kinds_of_layers(config), latent_of(config)
        family = FAMILIES.get(text_value(config, "model_type") or "")
        dim, unsplit = heads.dim, 0
        if family is not None and not family.vocab_parallel_embedding:
            unsplit = text_value(config, "vocab_size") * text_value(config, "hidden_size")
        if latent:  # transformers calls the part with positions head_dim, config.json nothing
            names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            dim = sum(text_value(config, name) or 0 for name in names) // 2
        return cls(
            num_layers=text_value(config, "num_hidden_layers"),
            num_heads=heads.query,
            num_kv_heads=heads.kv,
            head_dim=dim,
            layers_with_tokens=layers_with_tokens(config, kinds),
            latent=latent,
            states=states_of(config, kinds),
            unsplit_params=unsplit,
        )

    def kv_bytes_per_token(self, *, tp: int, itemsize: int) -> int:
        """Bytes that one token takes in the KV cache of one of `tp` ranks.

        Keys and values; a rank holds its share of the kv heads, or one that others hold too. Of
        latent attention what every rank holds whole: transformers' cache too has it before it is
        multiplied out.
        """
        width = self.latent or 2 * -(-self.num_kv_heads // tp) * self.head_dim
        return self.layers_with_tokens * width * itemsize


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
