"""What is said of a step's metrics."""

import pytest
from torch import nn
from transformers import AutoModelForCausalLM, GPTNeoXConfig, Qwen2Config, Qwen3MoeConfig

from ppo.step_metrics import model_size


@pytest.mark.parametrize("tied", [True, False])
def test_a_token_is_multiplied_with_layers_and_a_response_token_with_the_head(tied):
    config = Qwen2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=24, vocab_size=100, tie_word_embeddings=tied,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    # q and o 16 x 16; k and v 16 x 8; biases 16 + 8 + 8; MLP 3 x 16 x 24; two norms
    layer = 2 * 256 + 2 * 128 + 32 + 1152 + 32
    size = model_size(model)
    assert (size.num_params, size.head_params) == (2 * layer + 16, 1600)
    assert (size.num_layers, size.num_heads, size.head_dim) == (2, 4, 4)
    del model.lm_head
    model.score = nn.Linear(16, 1, bias=False)
    size = model_size(model)
    assert (size.num_params, size.head_params) == (2 * layer + 16 + 16, 0)


def test_a_value_model_of_any_family_has_no_head():
    config = GPTNeoXConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        vocab_size=100,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    assert model_size(model).head_params == 1600
    del model.lm_head  # its get_output_embeddings() raises then
    assert model_size(model).head_params == 0


def test_of_experts_a_token_visits_a_few():
    config = Qwen3MoeConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, vocab_size=32,
    )  # fmt: skip
    # heads of 8: q, o 16 x 16; k, v 16 x 8; their norms 8 + 8; router 4 x 16; three norms of 16
    others = 2 * 256 + 2 * 128 + 16 + 64 + 3 * 16
    assert model_size(AutoModelForCausalLM.from_config(config)).num_params == (
        others + 2 * (3 * 16 * 8)
    )
