"""The order in which the collector wakes an engine, and when it gives a scoring up."""

import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ppo.batch import make_batch
from ppo.config import load_config
from ppo.data.dataset import Prompt
from ppo.engines.contract import Completion
from ppo.metrics import Metrics
from ppo.models.tiny import build_tiny_tokenizer
from ppo.rewards.pool import RewardPool
from ppo.rollout.collector import Collector
from ppo.rollout.scoring import Scorer
from ppo.run.run import Run
from sharding.mesh import build_mesh, init_distributed
from tests.ppo.engines.drive import drive


def test_the_actor_takes_device_memory_only_when_the_engine_has_measured_what_is_free():
    order: list[str] = []

    class Engine:
        def start(self) -> Iterator[None]:
            order.append("start")
            yield

        def wake(self, loaded: Any) -> Generator[None, None, dict[str, float]]:
            order.append("load")
            loaded()
            yield
            order.append("map the cache")
            return {"reshard/received_mib": 3.0}

        def release(self) -> None:
            order.append("release")

    @contextmanager
    def on_device() -> Iterator[None]:
        order.append("actor in")
        yield
        order.append("actor out")

    parts: dict[str, Any] = {
        "config": None,
        "run": SimpleNamespace(drive=drive),
        "actor": SimpleNamespace(on_device=on_device),
        "engine": Engine(),
        "stop_token_ids": (),
    }
    metrics = Metrics(torch.device("cpu"))
    with Collector(**parts).awake(metrics):
        order.append("generate")
    expected = "start, actor in, load, actor out, map the cache, generate, release"
    assert ", ".join(order) == expected
    assert metrics.reduce()["reshard/received_mib"] == 3.0


HANGS = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str:
        time.sleep(600)
    return 0.0
"""


def test_a_reward_that_hangs_ends_the_run_before_every_sample_has_hung(tmp_path: Path):
    (tmp_path / "reward.py").write_text(HANGS)
    config = load_config(
        "ppo_tiny.yaml",
        [
            f"reward.function.path={tmp_path / 'reward.py'}",
            *("reward.num_workers=1", "reward.timeout_s=0.2", "reward.max_failed_fraction=0.1"),
            f"trainer.default_local_dir={tmp_path / 'run'}",
        ],
    )
    prompts = [Prompt(i, [7], "any", None, {}, "") for i in range(20)]
    batch = make_batch(prompts, [Completion([97], [0.0], "stop")] * 20)
    with init_distributed(torch.device("cpu")):
        mesh = build_mesh(config.dims(1, 1), torch.device("cpu"))
        pool = RewardPool(config.reward, log_path=tmp_path / "rewards.log")
        with Run(config, mesh, command=["test"]) as run, pool:
            scorer = Scorer(
                config=config,
                run=run,
                tokenizer=build_tiny_tokenizer(),
                pool=pool,
                reward_model=None,
            )
            with pytest.raises(RuntimeError, match=r"failed for \d+ of 20 samples") as error:
                scorer.score(batch, Metrics())
    found = re.search(
        r"failed for (\d+) of 20 samples, more than reward.max_failed", str(error.value)
    )
    assert found is not None and 3 <= int(found[1]) < 10, error.value
