"""What each model of a run is built from, where it is another one than the actor's."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo.config import load_config
from ppo.errors import InputError
from ppo.models import roles
from ppo.models.build import build_value_model
from ppo.models.learner import Model
from ppo.models.roles import Models, build_models, reset_critic
from sharding.mesh import build_mesh, init_distributed
from tests.ppo.models.hf_models import VOCAB, save_model

CPU = torch.device("cpu")
OVERRIDE = "{max_position_embeddings: 4096, rope_parameters: {rope_type: default, rope_theta: 7.0}}"


def built(folder: Path, *words: str) -> Models:
    """The models of a run with sequences of 64 tokens, on one rank; the critic made anew once."""
    actor = save_model(folder / "actor", "llama", max_position_embeddings=8)
    keys = (f"model.path={actor}", f"model.override_config={OVERRIDE}", *words)
    config = load_config("ppo_tiny.yaml", keys)
    mesh = build_mesh(config.dims(1, 1), CPU)
    models = build_models(config, mesh, folder, 1, num_ids=VOCAB)
    assert models.critic is not None
    reset_critic(config, mesh, folder, models.critic)
    return models


def theta(model: Model | None) -> float:
    assert model is not None
    return model.hf_config.rope_parameters["rope_theta"]


def test_what_is_overridden_of_the_actors_configuration_is_not_of_another_critics(tmp_path):
    own = save_model(tmp_path / "critic", "llama", max_position_embeddings=64)
    short = save_model(tmp_path / "short", "llama", max_position_embeddings=63)
    with init_distributed(CPU):
        models = built(tmp_path, f"critic.model.path={own}")
        assert (theta(models.actor), theta(models.critic)) == (7.0, 10000.0)
        assert theta(built(tmp_path).critic) == 7.0  # of the actor's folder
        with pytest.raises(InputError, match=r"critic.model.path = .*64 tokens.*= 63.*another"):
            built(tmp_path, f"critic.model.path={short}")


def test_a_critic_that_is_reset_leaves_no_second_one_behind(tmp_path, monkeypatch):
    made: list[weakref.ref[torch.Tensor]] = []

    def watched(*args: Any, **keys: Any) -> Any:
        module = build_value_model(*args, **keys)
        made.append(weakref.ref(next(module.parameters())))
        return module

    monkeypatch.setattr(roles, "build_value_model", watched)
    with init_distributed(CPU):
        models = built(tmp_path)
        assert models.critic is not None and len(made) == 2
        assert made[1]() is None  # while the critic's own goes on
