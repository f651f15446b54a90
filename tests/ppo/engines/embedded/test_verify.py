"""Families get the cache with which the embedded engine is right, or are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPTJForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from ppo.config import load_config
from ppo.engines.choose import build_engine
from ppo.engines.embedded.verify import choose_cache
from ppo.errors import InputError
from ppo.models.tiny import build_tiny_tokenizer
from sharding.mesh import build_mesh, init_distributed
from tests.ppo.models.families import EXTRA
from tests.ppo.models.hf_models import SHAPE


@pytest.mark.parametrize(
    ("family", "extra", "kind"),
    [
        ("nemotron", {}, "transformers"),  # passes nothing to attention
        ("falcon", {}, "transformers"),
        ("phimoe", {}, "transformers"),  # a window that only the mask knows
        # a head with a bias; its attention can be replaced in later versions
        ("gptj", {}, "own" if GPTJForCausalLM._supports_attention_backend else "transformers"),
        (
            "lfm2",
            {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
            "transformers",
        ),
        ("falcon_h1", {"num_hidden_layers": 2}, "transformers"),  # a buffer of no checkpoint
        ("recurrent_gemma", {}, "none"),  # keeps its state in the module
        # transformers' cache leaves some of its states where they were when rows change
        pytest.param("deepseek_v4", {}, "none", marks=pytest.mark.full),
        ("gpt_oss", {"num_hidden_layers": 2}, "own"),  # sinks
        ("granite_swa", {"num_hidden_layers": 2}, "own"),
    ],
)
def test_a_family_gets_the_fastest_cache_that_is_right(family, extra, kind):
    config = AutoConfig.for_model(family, **EXTRA.get(family, {}) | extra)
    assert choose_cache(config, compare=True) == kind
    if kind != "own":
        with pytest.raises(
            InputError, match=f"{family} that can be split over 2 ranks .* set roll"
        ):
            choose_cache(config, compare=True, num_ranks=2)


# glm4_moe: the bias of its experts is a buffer of the checkpoint
@pytest.mark.parametrize(
    "family",
    ["qwen2", "gemma2", "mistral", "gpt_neox", "opt", "granite", "glm4_moe", "apertus", "phi"],
)
def test_families_with_windows_caps_positions_and_scales_of_their_own_have_our_cache(family):
    config = AutoConfig.for_model(family, **EXTRA.get(family, {}))
    assert choose_cache(config, compare=True) == "own"


class Forgetful(Qwen2ForCausalLM):
    """Logits that follow from how many tokens come in."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:  # type: ignore
        output: Any = super().forward(input_ids, **kwargs)  # type: ignore
        output.logits = output.logits * len(input_ids)
        return output


class ForgetfulConfig(Qwen2Config):
    model_type = "forgetful"


Forgetful.config_class = ForgetfulConfig
AutoConfig.register("forgetful", ForgetfulConfig)
AutoModelForCausalLM.register(ForgetfulConfig, Forgetful)


def test_the_engine_is_not_built_for_a_family_that_no_cache_serves_unless_asked_to(tmp_path: Path):
    module = AutoModelForCausalLM.from_config(ForgetfulConfig(**SHAPE))
    options = ["rollout.engine=torch", "trainer.device=cpu"]
    with init_distributed(torch.device("cpu")):
        for verify in (True, False):
            config = load_config("ppo_tiny.yaml", [*options, f"model.verify_forward={verify}"])
            mesh = build_mesh(config.dims(1, 1), torch.device("cpu"))
            build = (config, mesh, module, build_tiny_tokenizer())
            if verify:
                with pytest.raises(InputError, match=r"cannot generate with forgetful: .*differ"):
                    build_engine(*build, model_path=tmp_path, run_dir=tmp_path)
            else:
                build_engine(*build, model_path=tmp_path, run_dir=tmp_path).close()
