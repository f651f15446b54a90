"""Device memory of a start and of a resume, at every border, against what `--check` predicts."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import train_ppo
from ppo.check.memory_phases import Plan, phases
from ppo.check.preflight import find_models, plan_of
from ppo.config import load_config
from sharding.mesh import init_distributed
from tests.fake_device import fake_device
from tests.peak_memory import PeakTracker
from tests.test_train import BASE, COMPARED, rows_of, train_here

CPU = torch.device("cpu")
OFFLOAD = (
    *("actor.fsdp.optimizer_offload=true", "actor.fsdp.param_offload=true"),
    *("critic.fsdp.optimizer_offload=true", "critic.fsdp.param_offload=false"),
)
SMALL = (
    *("data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "data.max_response_length=8"),
    *("data.val_files=[]", "data.train_max_samples=8", "reward.num_workers=1"),
    "model.verify_forward=false",
)
SMALL_BUFFERS = 1024
"""bytes of rotary frequencies and the like"""
BORDERS = ("build_models", "build_scorer", "load_models", "open_collector")


class Border(NamedTuple):
    """A part of a start, and the bytes on the device: before it, and at most within it."""

    name: str
    before: int
    peak: int


def states(plan: Plan, name: str) -> float:
    """Weights and moments that a phase has on the device."""
    [phase] = [phase for phase in phases(plan) if phase.name == name]
    states = ("parameters", "Adam moments")
    return sum(item.bytes for item in phase.items if item.name.endswith(states))


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Of one rank with a device."""
    config = load_config("ppo_tiny.yaml", [*BASE, *SMALL, *OFFLOAD])
    shapes = find_models(config).shapes
    return replace(plan_of(config, config.dims(1, 1), shapes), cuda=True)


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[list[Border]]]]:
    """Runs of two steps: whole, and rested with a start and a resume, whose borders are watched."""
    base, tracker, borders = tmp_path_factory.mktemp("starts"), PeakTracker(CPU), []

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watching(*args: Any, **kwargs: Any) -> Any:
            live = tracker._storages
            assert live is not None
            before = live.peak = live._total
            result = call(*args, **kwargs)
            borders[-1].append(Border(name, before, live.peak))
            return result

        return watching

    def run(folder: str, steps: int, *more: str) -> None:
        overrides = (f"trainer.total_training_steps={steps}", *SMALL, *more)
        train_here(0, 1, [(str(base / folder), overrides)])

    with init_distributed(CPU):
        run("whole", 2)
        with pytest.MonkeyPatch.context() as patch, fake_device():
            for name in BORDERS:
                patch.setattr(train_ppo, name, watched(name, getattr(train_ppo, name)))
            for steps in (1, 2):
                tracker = PeakTracker(CPU)
                borders.append([])
                gc.collect()  # what earlier runs held is no part of this one
                with tracker:
                    run("rested", steps, *OFFLOAD)
    yield base, borders


def test_a_start_and_a_resume_need_no_more_device_memory_than_the_phases_of_an_iteration(
    starts: tuple[Path, list[list[Border]]], plan: Plan
) -> None:
    """One model is built at a time, and moments of a checkpoint come into being where they rest."""
    spare = 512 * 64 * 4 + SMALL_BUFFERS  # the largest tensor is read before it is on a device
    start, resume = ({border.name: border for border in borders} for borders in starts[1])
    for borders in (start, resume):
        assert borders["build_models"].peak <= states(plan, "log-probs") + spare
    assert resume["load_models"].peak <= states(plan, "generate") + spare


def test_an_engine_starts_when_the_trainer_holds_what_it_holds_during_generation(
    starts: tuple[Path, list[list[Border]]], plan: Plan
) -> None:
    start, resume = starts[1]
    assert [border.name for border in start] == ["build_models", "build_scorer", "open_collector"]
    assert [border.name for border in resume] == [*BORDERS]
    for borders in (start, resume):
        more = borders[-1].before - states(plan, "generate")
        assert 0 <= more <= SMALL_BUFFERS


def test_a_resume_of_what_rests_on_the_host_ends_bitwise_as_an_undisturbed_run(
    starts: tuple[Path, list[list[Border]]],
) -> None:
    whole, rested = (rows_of(starts[0] / name) for name in ("whole", "rested"))
    for a, b in zip(whole, rested, strict=True):
        assert [a[name] for name in COMPARED] == [b[name] for name in COMPARED]
