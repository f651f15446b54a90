"""Sizes from the keys of a config.json, against the models that transformers builds from it."""

from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from ppo.model_shapes import SHAPES_FILE, parse_shape
from tests.ppo.models.families import EXTRA


@pytest.mark.parametrize(
    "family",
    [
        *("deepseek_v2", "deepseek_v3", "glm4_moe", "dots1", "ernie4_5_moe", "minimax_m2"),
        *("gpt2", "gpt_bigcode", "gpt_neox", "gptj", "opt", "bloom", "phi", "starcoder2"),
        *("gemma3n_text", "gemma4_text", "nemotron_h", "qwen3_next", "qwen3_5_text"),
        *("qwen3_moe", "mixtral", "gemma3_text", "olmo3", "gpt_oss", "apertus", "nemotron"),
    ],
)
def test_models_have_as_many_parameters_as_transformers_says(family):
    config = AutoConfig.for_model(family, **EXTRA.get(family, {}))
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).parameters()
    shape = parse_shape(config.to_dict())
    assert shape.num_params == pytest.approx(sum(p.numel() for p in parameters), rel=0.02)


def test_models_of_odd_layers_have_as_many_parameters_as_their_names_say():
    longcat = parse_shape(AutoConfig.for_model("longcat_flash").to_dict())
    assert longcat.num_params == pytest.approx(560e9, rel=0.01)
    keys: dict[str, Any] = {  # as google/gemma-3-4b-it is published
        "model_type": "gemma3",
        "text_config": {
            **{"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240},
            **{"num_hidden_layers": 34, "sliding_window": 1024},
        },
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    }
    table = yaml.safe_load(SHAPES_FILE.read_text())
    assert parse_shape(keys) == parse_shape(table["google/gemma-3-4b"])
    nemotron = AutoConfig.for_model("nemotron_h").to_dict()
    pattern = nemotron | {"layers_block_type": None, "hybrid_override_pattern": "ME*-"}
    assert parse_shape(pattern) == parse_shape(nemotron)


def distinct_published() -> dict[str, dict]:
    """The first name of each shape in configs/model_shapes.yaml."""
    table, found = yaml.safe_load(SHAPES_FILE.read_text()), {}
    for name, keys in table.items():
        if keys not in found.values():
            found[name] = keys
    return found


PUBLISHED = distinct_published()
ROUNDED = ("gpt_oss", "olmo2", "olmo3", "deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_moe_text")


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("Qwen/Qwen3.5-27B", 26.9), ("Qwen/Qwen3.5-9B", 8.95), ("Qwen/Qwen3.5-35B-A3B", 34.7)),
        *(("Qwen/Qwen3-Next-80B-A3B-Instruct", 79.7), ("openai/gpt-oss-20b", 20.9)),
        *(("openai/gpt-oss-120b", 116.8), ("deepseek-ai/DeepSeek-V3", 671.0)),
        *(("zai-org/GLM-4.5", 355), ("allenai/Olmo-3-1025-7B", 7.3)),
        *(("allenai/Olmo-3-1125-32B", 32.2), ("mistralai/Ministral-3-14B-Instruct-2512", 13.5)),
        *(("mistralai/Ministral-3-8B-Instruct-2512", 8.5), ("Qwen/Qwen3-235B-A22B", 235.1)),
        ("mistralai/Ministral-3-3B-Instruct-2512", 3.4),
    ],
)
def test_models_are_as_large_as_they_are_published(name, billions):
    assert parse_shape(PUBLISHED[name]).num_params == pytest.approx(billions * 1e9, rel=0.015)


@pytest.mark.full
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_of_models_has_as_many_parameters_as_transformers_says(name):
    """A few layers are made, and as many more as make a period of their kinds; the rest follows."""
    keys = PUBLISHED[name]
    period = keys.get("full_attention_interval", 1)

    def count(layers: int) -> int:
        changed = {**keys, "num_hidden_layers": layers, "pad_token_id": 0}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**changed))
        return sum(p.numel() for p in model.parameters())

    fewest = max(2, keys.get("first_k_dense_replace", 0) + 1, period)
    few, more = count(fewest), count(fewest + period)
    total = more + (keys["num_hidden_layers"] - fewest - period) // period * (more - few)
    # of the others biases of experts, sinks and norms of queries are not counted
    tolerance = 1e-3 if keys["model_type"] in ROUNDED else 1e-6
    assert parse_shape(keys).num_params == pytest.approx(total, rel=tolerance)
