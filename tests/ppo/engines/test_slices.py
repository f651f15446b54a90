"""How many steps a slice of time has."""

from types import SimpleNamespace
from typing import Any

from ppo.engines.slices import StepCount


def test_steps_approach_the_time_wanted_from_below_and_are_never_none():
    mesh: Any = SimpleNamespace(dims=SimpleNamespace(rollout_tp=1))
    count, counts = StepCount(mesh), []
    for _ in range(6):  # of 10 ms each
        count.learn(0.01 * count.steps, wanted_s=0.205)
        counts.append(count.steps)
    assert counts == [2, 4, 8, 16, 20, 20]
    count.learn(40.0, wanted_s=0.205)
    assert count.steps == 1
