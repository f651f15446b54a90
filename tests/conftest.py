"""What holds for all tests, however pytest is started: their order, which of them may run at the
same time, and which are skipped without a CUDA device or without SGLang."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# Two that start Slurm or processes of SGLang's at a time need more memory than a small machine has;
# so do, in the long trials, two that train SmolLM2.
ONE_AT_A_TIME = re.compile(r"slurm|sglang_job|export_sglang|sglang/test_host")
OF_THE_LONG_ONES = re.compile(ONE_AT_A_TIME.pattern + r"|^tests/test_(lora_runs|episodes)\.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    weights: dict[Path, int] = {}
    for item in items:
        weights[item.path] = max(weights.get(item.path, 0), _weight(item))
    items.sort(key=lambda item: -weights[item.path])  # stable; what takes long begins first
    if not find_spec("sglang"):  # importing it takes many seconds
        _skip(items, "sglang", "needs SGLang")
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            _skip(items, "gpu", "needs a CUDA device")


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


def _weight(item: pytest.Item) -> int:
    if ONE_AT_A_TIME.search(item.nodeid.partition("::")[0]) or item.get_closest_marker("sglang"):
        return 3
    if item.get_closest_marker("distributed"):
        return 2 if item.path.parent == Path(__file__).parent else 1  # the whole program
    return 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A process takes whole files, whose tests share fixtures."""
    from xdist.scheduler import LoadScopeScheduling

    alone = ONE_AT_A_TIME if "not full" in config.option.markexpr else OF_THE_LONG_ONES

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "one at a time" if alone.search(file) else file

    return Files(config, log)
