"""Which saved states training goes on from, and which metric keeps a checkpoint."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ppo.config import ConfigError, load_config, to_yaml
from ppo.kl import FixedKLController
from ppo.state import TrainState, find_start, state_problem
from sharding.checkpoint import Checkpointer
from sharding.mesh import ParallelDims, build_mesh, init_distributed

REQUIRED = ("model.path=tiny", "data.train_files=tiny", "trainer.device=cpu")
SAMPLER = {"epoch": 1, "position": 4, "num_prompts": 8}
STATE = {"step": 3, "sampler": SAMPLER, "kl_controller": {"value": 0.1}, "config": "model: {}"}


def test_a_state_that_was_saved_is_accepted() -> None:
    assert state_problem(3, STATE) is None
    assert state_problem(3, {**STATE, "sampler": None}) is None
    assert state_problem(3, {**STATE, "kl_controller": {"value": 0}}) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": 1_000_000_000}, "of step 1000000000"),
        ({"step": "3"}, "of step '3'"),
        ({"sampler": {**SAMPLER, "position": 1_000_000_000}}, "at 1000000000 of 8 prompts"),
        ({"sampler": {**SAMPLER, "position": 4.0}}, "its sampler is"),
        ({"sampler": {**SAMPLER, "epoch": -1}}, "its sampler is"),
        ({"sampler": {"position": 4}}, "its sampler is"),
        ({"sampler": [1]}, "its sampler is"),
        ({"kl_controller": {"value": math.nan}}, "its KL controller"),
        ({"kl_controller": {"value": math.inf}}, "its KL controller"),
        ({"kl_controller": {"value": -1}}, "its KL controller"),
        ({"kl_controller": {"value": "0.1"}}, "its KL controller"),
        ({"kl_controller": {}}, "its KL controller"),
        ({"kl_controller": None}, "its KL controller"),
        ({"config": None}, "no configuration"),
    ],
)
def test_a_state_that_no_training_has_left_is_named(change: dict[str, Any], words: str) -> None:
    problem = state_problem(3, {**STATE, **change})
    assert problem is not None and words in problem


def start_of(run: Path, *overrides: str, is_restart: bool = False) -> tuple[Path | None, int]:
    """Where a start in that folder goes on from."""
    config = load_config(None, [*REQUIRED, f"trainer.default_local_dir={run}", *overrides])
    state = TrainState(cast(Any, None), FixedKLController(0.1))
    mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), torch.device("cpu"))
    owner = cast(Any, SimpleNamespace(is_restart=is_restart))
    with Checkpointer(run / "checkpoints", mesh) as checkpoints:
        return find_start(config, owner, checkpoints, state), state.step


def test_a_start_goes_on_from_the_newest_state_that_makes_sense(tmp_path: Path, caplog) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    config = to_yaml(load_config(None, list(REQUIRED)))
    with init_distributed(torch.device("cpu")):
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), torch.device("cpu"))
        for folder, steps in ((run, (1, 2, 3)), (other, (7,))):
            with Checkpointer(folder / "checkpoints", mesh, async_save=False) as checkpoints:
                for step in steps:
                    value = math.nan if step == 3 else 0.1
                    state = {**STATE, "step": step, "sampler": None, "config": config}
                    state["kl_controller"] = {"value": value}
                    checkpoints.save(step, {}, {}, state)
        two, seven = (f / "checkpoints" / f"step_{n:08d}" for f, n in ((run, 2), (other, 7)))
        assert start_of(run) == (two, 2)
        assert "step_00000003 skipped: its KL controller is {'value': nan}" in caplog.text
        assert start_of(run, "trainer.resume_mode=disable") == (None, 0)
        assert start_of(run, "trainer.resume_mode=disable", is_restart=True) == (two, 2)
        by_path = f"trainer.resume_mode={other}"
        assert start_of(run, by_path) == (seven, 7)
        assert start_of(run, by_path, is_restart=True) == (two, 2)
        assert start_of(tmp_path / "new", by_path, is_restart=True) == (seven, 7)
        assert start_of(tmp_path / "new") == (None, 0)
        with pytest.raises(ConfigError, match=r"actor\.clip_ratio: 0\.2 -> 0\.3 since .*_00000002"):
            start_of(run, "actor.clip_ratio=0.3")
        allowed = ("actor.clip_ratio=0.3", "trainer.allow_changed_config=true")
        assert start_of(run, *allowed) == (two, 2)
