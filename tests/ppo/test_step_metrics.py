"""What is said of a step's metrics."""

import math

import pytest

from ppo.config import load_config
from ppo.step_metrics import EngineAlarm

NAME = "training/rollout_probs_diff_mean"


@pytest.mark.parametrize(
    ("dtype", "seen", "warnings"),
    [
        ("float32", [0.009, 0.0, 0.02, 0.3], ["step 3: "]),
        ("float32", [math.nan], ["step 1: "]),
        ("float32", [None, 0.01], []),
        ("bfloat16", [0.3], []),
    ],
)
def test_an_engine_in_float32_that_disagrees_is_said_once(caplog, dtype, seen, warnings):
    alarm = EngineAlarm(load_config("ppo_tiny.yaml", [f"rollout.dtype={dtype}"]))
    for step, value in enumerate(seen, start=1):
        alarm.check(step, {} if value is None else {NAME: value})
    assert [record.message[:8] for record in caplog.records] == warnings
