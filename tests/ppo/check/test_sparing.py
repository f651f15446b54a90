"""Settings that save memory and exclude each other are refused before anything is loaded."""

import pytest

from ppo.check.rules import check_config
from ppo.check.warnings import config_warnings
from ppo.config import load_config

SELECTIVE = "model.checkpoint_policy=selective"
CODES = "critic.optim.state_dtype=8bit"


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        ((SELECTIVE, "model.enable_activation_offload=true"), "model.enable_activation_offload"),
        ((SELECTIVE, "model.compile=layers"), "model.checkpoint_policy"),
        (("model.mlp_block_rows=64", "model.compile=layers"), "model.mlp_block_rows"),
        ((CODES, "parallel.align_to_rollout=true"), "critic.optim.state_dtype"),
    ],
)
def test_of_two_settings_that_cannot_both_be_one_is_named(overrides, path) -> None:
    config = load_config("ppo.yaml", list(overrides))
    assert [p.path for p in check_config(config, world_size=8, ranks_per_node=8)] == [path]
    for alone in overrides:
        config = load_config("ppo.yaml", [alone])
        assert check_config(config, world_size=8, ranks_per_node=8) == []


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (("model.checkpoint_policy=none", "model.enable_activation_offload=true"), "no effect"),
        ((SELECTIVE, "model.enable_gradient_checkpointing=false"), "selective has no effect"),
        (
            ("actor.fsdp.optimizer_on_host=true", "actor.fsdp.optimizer_offload=true"),
            "actor.fsdp.optimizer_offload has no effect beside optimizer_on_host",
        ),
        (
            ("actor.fsdp.optimizer_on_host=true", "actor.fsdp.offload_policy=true"),
            "have no effect beside offload_policy",
        ),
    ],
)
def test_a_setting_without_effect_is_said(overrides, text) -> None:
    notes = config_warnings(load_config("ppo.yaml", list(overrides)), world_size=8)
    assert any(text in note for note in notes), notes
