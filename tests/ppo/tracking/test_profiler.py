"""Which part of an iteration is traced; tests/test_train.py has a run with it."""

from types import SimpleNamespace
from typing import Any

import torch

from ppo.tracking.profiler import StepProfiler
from ppo.tracking.trace import read_events


def test_a_window_ends_with_the_first_step_of_the_optimizer(tmp_path):
    here: Any = SimpleNamespace(rank=3, device=torch.device("cpu"))
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    profiler = StepProfiler(tmp_path, [2], here)
    found = []
    for step in (1, 2, 3):
        with profiler.window(step, optimizer):
            for _ in range(3):
                layer(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        found.append(profiler.report())
    assert [bool(metrics) for metrics in found] == [False, True, False]
    assert found[1]["timing_share/comm"] == 0 < found[1]["profile/compute_s"]
    [path] = [path for path in (tmp_path / "profile").rglob("*") if path.is_file()]
    assert path.name == "rank_0003.trace.json.gz"  # the table is rank 0's
    names = [event["name"] for event in read_events(path)]
    assert names.count("aten::linear") == 1
    assert not optimizer._optimizer_step_post_hooks


def test_a_window_without_an_optimizer_step_ends_with_its_block(tmp_path):
    here: Any = SimpleNamespace(rank=0, device=torch.device("cpu"))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    profiler = StepProfiler(tmp_path, [1], here)
    with profiler.window(1, optimizer):
        torch.ones(2).add(1)
    assert profiler.report()["profile/window_s"] > 0
    assert profiler.report() == {}
    assert "| window |" in (tmp_path / "profile" / "step_00000001" / "summary.md").read_text()
