"""The order in which the collector wakes an engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from ppo.collect import Collector
from ppo.metrics import Metrics


def test_the_actor_takes_device_memory_only_when_the_engine_has_measured_what_is_free():
    order: list[str] = []

    class Engine:
        stats: ClassVar = {"reshard/received_mib": 1.0}

        def start(self) -> Iterator[None]:
            order.append("start")
            yield

        def wake(self, module: Any, loaded: Any) -> Iterator[None]:
            order.append("load")
            loaded()
            yield
            order.append("map the cache")

        def release(self) -> None:
            order.append("release")

    @contextmanager
    def on_device() -> Iterator[None]:
        order.append("actor in")
        yield
        order.append("actor out")

    def drive(work: Iterator[None]) -> None:
        for _ in work:
            pass

    parts: dict[str, Any] = {
        **dict.fromkeys(("config", "tokenizer", "pool", "reward_model")),
        "run": SimpleNamespace(drive=drive),
        "engine": Engine(),
        "stop_token_ids": (),
    }
    actor: Any = SimpleNamespace(on_device=on_device)
    with Collector(**parts).awake(actor, Metrics(torch.device("cpu"))):
        order.append("generate")
    expected = "start, actor in, load, actor out, map the cache, generate, release"
    assert ", ".join(order) == expected
