import pytest
import torch

from sharding.layout import (
    Layout,
    Style,
    padded_vocabulary,
    row_parallel_weight,
    split_problems,
    tp_layout,
    tp_layouts,
    view_2d,
)
from tests.sharding.families import (
    FAMILY_NAMES,
    SHAPES,
    apply_layout,
    full_parameters,
    small_config,
)
from tests.sharding.reshard.engine_slices import hf_slices, sglang_slices


def layout_of(config, full, *, tp: int, tp_rank: int, style: Style) -> Layout:
    shapes = {name: tuple(tensor.shape) for name, tensor in full.items()}
    layout = tp_layout(
        config.model_type, shapes, config.to_dict(), tp=tp, tp_rank=tp_rank, style=style
    )
    assert layout is not None
    return layout


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor.reshape(view_2d(tensor.shape))), name


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_family_is_sliced_as_the_engines_hold_it(family, shape, tied):
    config = small_config(family, tie_word_embeddings=tied, **SHAPES[shape])
    full = full_parameters(config)
    assert ("lm_head.weight" in full) is not tied
    for tp in (1, 2, 4, 8):
        for tp_rank in range(tp):
            sglang = sglang_slices(
                full,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                tp=tp,
                tp_rank=tp_rank,
                split_embedding=family != "gemma3_text",
            )
            layout = layout_of(config, full, tp=tp, tp_rank=tp_rank, style="sglang")
            assert_same(apply_layout(layout, full), sglang)
            layout = layout_of(config, full, tp=tp, tp_rank=tp_rank, style="hf")
            assert_same(apply_layout(layout, full), hf_slices(full, tp=tp, tp_rank=tp_rank))


@pytest.mark.parametrize(
    ("rows", "tp", "padded"),
    [
        (50257, 1, 50304),
        (50257, 2, 50304),
        (151936, 8, 151936),
        (152064, 8, 152064),
        (32000, 8, 32000),
        (100, 4, 128),
        (65, 8, 128),
        (129, 8, 192),
        (129, 5, 320),
    ],
)
def test_vocabulary_is_padded_to_a_multiple_that_the_ranks_divide(rows, tp, padded):
    assert padded_vocabulary(rows, tp) == padded


def test_rank_beyond_a_short_vocabulary_gets_zeros_only():
    config = small_config("llama", vocab_size=10)
    full = full_parameters(config)
    layout = layout_of(config, full, tp=8, tp_rank=7, style="sglang")
    assert layout.targets["lm_head.weight"] == (8, 48)
    assert not any(region.source == "lm_head.weight" for region in layout.regions)
    assert torch.equal(apply_layout(layout, full)["lm_head.weight"], torch.zeros(8, 48))


def test_unknown_architecture_or_parameter_has_no_layout_but_one_rank_always_has():
    config = small_config("llama")
    full = full_parameters(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in full.items()}
    assert tp_layouts(shapes, {"model_type": "mamba"}, tp=2, style="hf") is None
    shapes["model.layers.0.self_attn.sinks"] = (8,)
    assert tp_layouts(shapes, config.to_dict(), tp=2, style="hf") is None
    whole = tp_layout("mamba", shapes, {}, tp=1, tp_rank=0, style="hf")
    assert whole is not None and whole.targets.keys() == shapes.keys()
    assert tp_layout("mamba", shapes, {}, tp=1, tp_rank=0, style="sglang") is None


def test_degrees_that_split_no_heads_are_refused_with_the_numbers():
    config = small_config("llama", num_attention_heads=12, num_key_value_heads=6).to_dict()
    assert split_problems(config, 2) == []
    problems = " ".join(split_problems(config, 8))
    for part in ("8", "12 attention heads", "6 kv heads"):
        assert part in problems
    assert "intermediate_size 40" in " ".join(split_problems(config, 3))


def test_only_row_parallel_matrices_are_sharded_on_dim_1():
    config = small_config("llama")
    full = full_parameters(config)
    chosen = row_parallel_weight("llama")
    names = {name for name, tensor in full.items() if chosen(name, tensor)}
    assert names == {
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    }
    assert not any(row_parallel_weight("mamba")(name, tensor) for name, tensor in full.items())
