"""Sizes from the keys of a config.json, against the models that transformers builds from it."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ppo.model_shapes import parse_shape
from tests.ppo.models.families import EXTRA


@pytest.mark.parametrize(
    "family",
    [
        *("deepseek_v2", "deepseek_v3", "glm4_moe", "dots1", "ernie4_5_moe", "minimax_m2"),
        *("gpt2", "gpt_bigcode", "gpt_neox", "gptj", "opt", "bloom", "phi", "starcoder2"),
        *("qwen3_moe", "mixtral", "gemma3_text", "olmo3", "gpt_oss", "apertus", "nemotron"),
    ],
)
def test_models_have_as_many_parameters_as_transformers_says(family):
    config = AutoConfig.for_model(family, **EXTRA.get(family, {}))
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).parameters()
    shape = parse_shape(config.to_dict())
    assert shape.num_params == pytest.approx(sum(p.numel() for p in parameters), rel=0.02)
