"""Families that the embedded engine fails on, or samples wrongly, are refused when it is built."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ppo.config import load_config
from ppo.engines.choose import build_engine
from ppo.engines.embedded.verify import check_generation
from ppo.errors import InputError
from ppo.models.tiny import build_tiny_tokenizer
from sharding.mesh import build_mesh, init_distributed
from tests.ppo.models.families import EXTRA
from tests.ppo.models.hf_models import SHAPE


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("nemotron", "missing 1 required keyword-only argument"),  # passes nothing to attention
        ("gpt_oss", "attention sinks are not supported"),
        ("falcon", "it fails"),
        ("recurrent_gemma", "its log-probs differ"),  # padding of a shorter prompt in its state
        ("phimoe", "its log-probs differ"),  # a window that only the mask knows
    ],
)
def test_a_family_that_it_cannot_generate_with_is_refused_by_name(family, reason):
    config = AutoConfig.for_model(family, **EXTRA.get(family, {}))
    with pytest.raises(
        InputError, match=f"cannot generate with {family}: .*{reason}.* use rollout"
    ):
        check_generation(config)


# glm4_moe: the bias of its experts is a buffer of the checkpoint
@pytest.mark.parametrize(
    "family",
    ["qwen2", "gemma2", "mistral", "gpt_neox", "opt", "granite", "glm4_moe", "apertus", "phi"],
)
def test_families_with_windows_caps_positions_and_scales_of_their_own_are_right(family):
    check_generation(AutoConfig.for_model(family, **EXTRA.get(family, {})))


def test_the_engine_is_not_built_for_such_a_family_unless_asked_to(tmp_path: Path):
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model("nemotron", **SHAPE))
    options = ["rollout.engine=torch", "trainer.device=cpu"]
    with init_distributed(torch.device("cpu")):
        for verify in (True, False):
            config = load_config("ppo_tiny.yaml", [*options, f"model.verify_forward={verify}"])
            mesh = build_mesh(config.dims(1, 1), torch.device("cpu"))
            build = (config, mesh, module, build_tiny_tokenizer())
            if verify:
                with pytest.raises(InputError, match="cannot generate with nemotron"):
                    build_engine(*build, model_path=tmp_path, run_dir=tmp_path)
            else:
                build_engine(*build, model_path=tmp_path, run_dir=tmp_path).close()
