"""SGLang in the ranks on real GPUs: what has to hold before it is the default there, line by line.

Ready to run, and not yet run by us:

    pytest -m gpu tests/ppo/engines/sglang/test_gpu_rank.py

Each test prints one line of the verdict with its figures; one GPU is enough for all but the last.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ppo.config import Config, DataConfig, ModelConfig, RolloutConfig, TrainerConfig
from ppo.engines.contract import Request, SamplingParams
from ppo.engines.sglang.engine import SGLangEngine
from ppo.engines.sglang.rank_executor import RankExecutor
from sharding.fsdp import shard_model
from sharding.mesh import ParallelDims, build_mesh
from tests.distributed import run_distributed
from tests.ppo.engines.drive import drive, generate
from tests.ppo.engines.sglang.test_gpu import (
    CYCLES,
    SLACK,
    change_weights,
    check_agreement,
    devices,
    free_bytes,
    save_qwen2,
)

pytestmark = [pytest.mark.gpu, pytest.mark.sglang, pytest.mark.timeout(1800)]

GIB = 1024**3
LEAST_SPEED = 0.9
"""tokens/s of an engine in the rank over those of one in its own process"""
Figures = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen2(tmp_path_factory.mktemp("model") / "qwen2")


@pytest.fixture
def verdict(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[[str], None]]:
    """Takes the figures; says the line and them when the test is over."""
    said: list[str] = []
    yield said.append
    line = (request.function.__doc__ or "").split(":")[0]
    result = "holds" if said else "DOES NOT HOLD"
    with capsys.disabled():
        print(f"\nSGLang in the rank: {line}: {result} {'; '.join(said)}", flush=True)


def open_engine(rank: int, world_size: int, folder: str, **rollout: Any) -> Any:
    """An engine of all ranks, and the sharded model."""
    from transformers import AutoModelForCausalLM

    device = torch.device("cuda", rank)
    dims = ParallelDims(world_size=world_size, ranks_per_node=world_size, rollout_tp=world_size)
    mesh = build_mesh(dims.resolve(), device)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    nn.Module.to(module, device)
    shard_model(module, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    deterministic = rollout.pop("deterministic", False)
    options: Figures = {"engine_process": "rank", "gpu_memory_utilization": 0.5}
    options |= {"max_model_len": 1024, "verify_weights": 1, **rollout}
    config = Config(
        data=DataConfig(train_files=["tiny"]),
        model=ModelConfig(path=folder),
        trainer=TrainerConfig(deterministic=deterministic),
        rollout=RolloutConfig(
            tensor_model_parallel_size=world_size,
            **{"engine_process": "rank", **options, **rollout},
        ),
    )
    logs = Path(folder).parent / "logs"
    return SGLangEngine(config, mesh, module, model_path=folder, log_dir=logs), module, device


def cycles(rank: int, world_size: int, folder: str, rollout: Figures) -> Figures:
    """Wake, agree, release, train, again: what is free at each point, and the speed."""
    engine, module, device = open_engine(rank, world_size, folder, **rollout)
    try:
        drive(engine.start())
        awake, released, speeds = [], [], []
        for cycle in range(CYCLES):
            drive(engine.wake())
            check_agreement(engine, module, device)
            speeds.append(_speed(engine))
            awake.append(free_bytes(device))
            engine.release()
            change_weights(module, cycle)
            released.append(free_bytes(device))
        asked = engine._memory.weight_bytes + engine._memory.cache.bytes
        return {"asked": asked, "awake": awake, "released": released, "speed": max(speeds[1:])}
    finally:
        engine.close()


def _speed(engine: SGLangEngine) -> float:
    params = SamplingParams(max_new_tokens=128, ignore_eos=True)
    requests = [Request(i, [100 + i, 7, 9]) for i in range(128)]
    return drive(generate(engine, requests, params)).metrics.get("rollout/tokens_per_s", 0.0)


def check_memory(figures: Figures) -> str:
    """What was taken came back, in every cycle alike."""
    released, asked = figures["released"], figures["asked"]
    assert max(released) - min(released) < SLACK, figures
    assert min(released) - max(figures["awake"]) > asked - SLACK, figures
    gib = [f"{value / GIB:.2f}" for value in released]
    return f"{asked / GIB:.1f} GiB come and go, free afterwards {', '.join(gib)} GiB"


def run_cycles(folder: Path, ranks: int = 1, **rollout: Any) -> Figures:
    found = run_distributed(cycles, ranks, str(folder), rollout, timeout_s=600, device_type="cuda")
    return found[0]


def test_eager(folder: Path, verdict: Callable[[str], None]):
    """T = 1, eager, storages released"""
    verdict(check_memory(run_cycles(folder, enforce_eager=True)))


def test_graphs(folder: Path, verdict: Callable[[str], None]):
    """CUDA graphs with the memory saver in hook mode torch, three cycles"""
    verdict(check_memory(run_cycles(folder)))


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_expandable_segments(
    folder: Path,
    verdict: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    eager: bool,
):
    """The same beside expandable segments"""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    verdict(check_memory(run_cycles(folder, enforce_eager=eager)))


def test_speed_and_memory_of_both_kinds(folder: Path, verdict: Callable[[str], None]):
    """No slower than in its own process, and more memory free"""
    rank, host = (run_cycles(folder, engine_process=kind) for kind in ("rank", "host"))
    assert rank["speed"] > LEAST_SPEED * host["speed"], (rank, host)
    assert min(rank["released"]) >= min(host["released"]), (rank, host)
    verdict(
        f"{rank['speed']:.0f} : {host['speed']:.0f} tokens/s, free after release "
        f"{rank['released'][-1] / GIB:.2f} : {host['released'][-1] / GIB:.2f} GiB"
    )


def products(rank: int, world_size: int, folder: str) -> bool:
    """Whether the trainer's matrix product is bitwise the same with an engine beside it."""
    torch.manual_seed(0)
    a, b = (torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    before = a @ b
    engine, *_ = open_engine(rank, world_size, folder)
    try:
        with pytest.raises(ValueError, match="engine_process=host"):
            open_engine(rank, world_size, folder, deterministic=True)
        return torch.equal(before, a @ b)
    finally:
        engine.close()


def test_the_trainers_products(folder: Path, verdict: Callable[[str], None]):
    """The trainer's products are its own; deterministic inference is refused"""
    assert run_distributed(products, 1, str(folder), timeout_s=600, device_type="cuda") == [True]
    verdict("bitwise equal")


def broken(rank: int, world_size: int, folder: str) -> None:
    """An exception behind a launched forward pass; the same engine goes on."""
    engine, module, device = open_engine(rank, world_size, folder)
    try:
        drive(engine.wake())
        assert isinstance(engine.executor, RankExecutor)
        runner = engine.executor.steps.scheduler.tp_worker.model_runner
        whole, calls = runner.forward, []

        def failing(*args: Any, **kwargs: Any) -> Any:
            result = whole(*args, **kwargs)
            calls.append(1)
            if len(calls) == 5:
                raise FloatingPointError("behind a launch")
            return result

        runner.forward = failing
        with pytest.raises(FloatingPointError, match="behind a launch"):
            _speed(engine)
        runner.forward = whole
        check_agreement(engine, module, device)
    finally:
        engine.close()


def test_an_exception(folder: Path, verdict: Callable[[str], None]):
    """An exception between kernels, a reset, and on"""
    run_distributed(broken, 1, str(folder), timeout_s=600, device_type="cuda")
    verdict("the same engine agrees afterwards")


def test_two_gpus(folder: Path, verdict: Callable[[str], None]):
    """T = 2 with graphs and the custom all-reduce"""
    if devices() < 2:
        pytest.skip("needs 2 CUDA devices")
    verdict(check_memory(run_cycles(folder, ranks=2)))
