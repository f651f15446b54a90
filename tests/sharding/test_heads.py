"""Heads, from configurations of every kind."""

from transformers import AutoConfig

from sharding.heads import Heads


def test_layers_with_heads_of_their_own_count_as_the_largest():
    config = AutoConfig.for_model(
        "gemma4_text",
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        global_head_dim=512,
    )
    assert Heads.of(config) == (8, 4, 512)


def test_a_model_without_attention_counts_as_one_head_of_its_width():
    assert Heads.of(AutoConfig.for_model("mamba", hidden_size=64)) == (1, 1, 64)
    assert Heads.of({"model_type": "mamba", "hidden_size": 64}) == (1, 1, 64)
