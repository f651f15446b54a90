"""Which saved states training goes on from, and which metric keeps a checkpoint."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ppo.config import ConfigError, EarlyStopConfig, load_config, to_yaml
from ppo.guards.guard import Guard
from ppo.kl import FixedKLController
from ppo.models.learner import Learner
from ppo.models.roles import Models
from ppo.state.checkpoints import find_start, load_models
from ppo.state.train_state import EarlyStop, TrainState, new_state, state_problem
from sharding.checkpoint import Checkpointer
from sharding.mesh import ParallelDims, build_mesh, init_distributed

REQUIRED = ("model.path=tiny", "data.train_files=tiny", "trainer.device=cpu")
SAMPLER = {"epoch": 1, "position": 4, "num_prompts": 8}
STATE = {"step": 3, "sampler": SAMPLER, "kl_controller": {"value": 0.1}, "config": "model: {}"}


def test_a_run_ends_when_its_metric_was_not_better_so_often_in_a_row() -> None:
    stop = EarlyStop(EarlyStopConfig(metric="score", patience=2))
    seen = []
    for value in (0.5, None, 0.4, 0.6, math.nan, None, 0.6):
        stop.note({} if value is None else {"score": value})
        seen.append(bool(stop.reason))
    assert seen == [False] * 6 + [True]
    assert stop.reason == "trainer.early_stop: score was 2 times not better than 0.6"
    patient = EarlyStop(EarlyStopConfig(metric="score", patience=3))
    patient.load_state_dict(stop.state_dict())  # a resume may have more patience
    assert not patient.reason and (patient.best, patient.worse) == (0.6, 2)
    other = EarlyStop(EarlyStopConfig(metric="-loss", patience=1))
    other.load_state_dict(stop.state_dict())
    assert (other.best, other.worse) == (None, 0)
    for loss, ends in ((2.0, False), (1.0, False), (1.5, True)):
        other.note({"loss": loss})
        assert bool(other.reason) == ends
    assert "than 1" in other.reason
    negative = EarlyStop(EarlyStopConfig(metric="score", patience=1))
    for score in (-0.5, -0.7):
        negative.note({"score": score})
    assert negative.reason.endswith("not better than -0.5")
    EarlyStop(EarlyStopConfig()).note({"score": 1.0})


def test_a_metric_that_is_named_and_that_no_step_has_is_said_once(caplog) -> None:
    rule = "guards.rules=[{metric: actor/grad_nrom, above: 1, action: abort}]"
    metric = "trainer.early_stop.metric=-val-core/tiny/reward/mean@1"
    config = load_config(None, [*REQUIRED, rule, metric])
    nothing = cast(Any, SimpleNamespace(device_groups=()))
    state = new_state(config, nothing, nothing, nothing)
    state.say_missing({"val-core/tiny/reward/mean@1": 0.5})  # a validation before the first step
    assert not caplog.messages
    state.say_missing({"critic/grad_norm": 1.0})  # the critic's warm-up
    assert not caplog.messages
    for _ in range(2):
        state.say_missing({"actor/grad_norm": 1.0, "critic/grad_norm": 1.0})
    assert caplog.messages == [
        "guards.rules[0]: step 0 has no metric actor/grad_nrom (did you mean actor/grad_norm?); "
        "nothing is done until one has it, said once"
    ]


def test_a_state_that_was_saved_is_accepted() -> None:
    assert state_problem(3, STATE) is None
    assert state_problem(3, {**STATE, "sampler": None}) is None
    assert state_problem(3, {**STATE, "kl_controller": {"value": 0}}) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": 1_000_000_000}, "of step 1000000000"),
        ({"step": "3"}, "of step '3'"),
        ({"early_stop": {"metric": None}}, "its early stop is {"),
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
    state = TrainState(cast(Any, None), FixedKLController(0.1), Guard())
    mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), torch.device("cpu"))
    owner = cast(Any, SimpleNamespace(is_restart=is_restart))
    with Checkpointer(run / "checkpoints", mesh) as checkpoints:
        return find_start(config, owner, checkpoints, state), state.step


def test_a_start_whose_checkpoint_is_found_damaged_in_loading_goes_on_from_the_one_before(
    tmp_path: Path, caplog
) -> None:
    options = (f"trainer.default_local_dir={tmp_path}", "algorithm.adv_estimator=grpo")
    config = load_config(None, [*REQUIRED, *options])
    with init_distributed(torch.device("cpu")):
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), torch.device("cpu"))
        module = torch.nn.Linear(2, 2)
        actor = Learner(
            name="actor",
            module=module,
            device=mesh.device,
            optimizer=torch.optim.AdamW(module.parameters()),
            optim=config.actor.optim,
            grad_clip=1.0,
            total_steps=9,
        )
        models = Models(actor, None, None)
        optimizers = models.optimizers(["actor"])
        folder = tmp_path / "checkpoints"
        with Checkpointer(folder, mesh, async_save=False, max_to_keep=3) as checkpoints:
            for step in (1, 2, 3):
                torch.nn.init.constant_(module.weight, step)
                state = {**STATE, "step": step, "sampler": None, "config": to_yaml(config)}
                checkpoints.save(step, models.modules(), optimizers, state)
        for step in (2, 3):
            file = folder / f"step_{step:08d}" / "tensors" / "__0_0.distcp"
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        state = TrainState(cast(Any, None), FixedKLController(0.1), Guard())
        run = cast(Any, SimpleNamespace(is_restart=False))
        with Checkpointer(folder, mesh) as checkpoints:
            start = find_start(config, run, checkpoints, state)
            assert start is not None and state.step == 3
            found = load_models(config, run, checkpoints, models, state, start)
            assert found.name == "step_00000001" and state.step == 1
            assert module.weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]
            assert "step_00000003 skipped" in caplog.text and "step_00000002 sk" in caplog.text


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
