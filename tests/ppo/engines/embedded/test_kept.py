"""What the plan says that tokens and sequences leave in an engine is what caches hold of them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from ppo.engines.embedded.cohorts import CohortCache
from ppo.engines.embedded.kv_cache import KVCache
from ppo.engines.embedded.model import CacheKind, LocalModel
from ppo.model_shapes import AttentionShape, parse_shape
from ppo.models.small_copy import build_small_copy
from tests.ppo.models.families import EXTRA

CPU = torch.device("cpu")
full = pytest.mark.full


def cache_of(family: str, kind: CacheKind) -> tuple[Any, Any]:
    """(configuration, cache) of a small copy that has read three tokens for each of two rows."""
    small = build_small_copy(AutoConfig.for_model(family, **EXTRA.get(family, {})))
    model = LocalModel(
        small.config,
        device=CPU,
        dtype=torch.float32,
        tp_mesh=None,
        num_ids=8,
        buffers=dict(small.named_buffers()),
        cache=kind,
    )
    model.allocate()
    for parameter in model.parameters().values():
        parameter.fill_(0.01)
    cache = model.make_cache(rows=2, columns=64)
    step = cache.prefill([3], [2], CPU)
    model.logits(torch.zeros(1, 3, dtype=torch.int64), step, cache, last=torch.tensor([2]))
    return small.config, cache


@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v3",
        *(pytest.param(name, marks=full) for name in ("qwen2", "deepseek_v2")),
        *(pytest.param(name, marks=full) for name in ("glm4_moe_lite", "longcat_flash")),
        *(pytest.param(name, marks=full) for name in ("minicpm3", "youtu", "axk1", "gemma3_text")),
    ],
)
def test_a_token_takes_in_our_cache_what_the_plan_says(family: str) -> None:
    config, cache = cache_of(family, "own")
    assert isinstance(cache, KVCache)
    per_token = cache.num_bytes / (cache.rows * cache.columns)
    assert AttentionShape.of(config).kv_bytes_per_token(tp=1, itemsize=4) == per_token


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_5_text",
        *(pytest.param(name, marks=full) for name in ("qwen3_next", "kimi_linear", "nemotron_h")),
        *(pytest.param(name, marks=full) for name in ("falcon_h1", "granitemoehybrid", "lfm2")),
    ],
)
def test_tokens_and_states_take_in_transformers_cache_what_the_plan_says(family: str) -> None:
    """But for its convolutions: they keep one input more than SGLang's, in the model's dtype."""
    config, cache = cache_of(family, "transformers")
    assert isinstance(cache, CohortCache)
    found = cache._cohorts[0].cache
    assert found is not None
    layers = found.layers
    shape = AttentionShape.of(config)
    tokens = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    numbers = sum(t.numel() for t in tokens if t is not None)
    assert shape.kv_bytes_per_token(tp=1, itemsize=4) == numbers * 4 / 3
    others = [
        t for layer in layers for t in tensors(vars(layer)) if all(t is not k for k in tokens)
    ]
    states = shape.states
    held = sum(t.numel() for t in others if t.is_floating_point())
    recurrent = states.layers * states.recurrent
    assert recurrent <= held and recurrent + states.layers * states.conv <= held
    assert held <= recurrent + 2 * states.layers * states.conv


def tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize(
    ("family", "layers"), [("deepseek_v2", 27), ("deepseek_v3", 61), ("glm4_moe_lite", 47)]
)
def test_a_latent_of_576_numbers_is_whole_on_every_rank_whoever_wrote_the_configuration(
    family: str, layers: int
) -> None:
    """config.json as published has no head_dim; transformers' own calls 64 of 192 numbers so."""
    own = {**EXTRA.get(family, {}), "num_hidden_layers": layers}
    keys = AutoConfig.for_model(family, **own).to_dict()
    published = {key: value for key, value in keys.items() if key != "head_dim"}
    for found in (
        *(AttentionShape.of(keys), AttentionShape.of(published)),
        *(AttentionShape.of(AutoConfig.for_model(**keys)), parse_shape(published)),
    ):
        for tp in (1, 8):
            assert found.kv_bytes_per_token(tp=tp, itemsize=2) == layers * (512 + 64) * 2
        assert found.head_dim == AttentionShape.of(keys).head_dim
