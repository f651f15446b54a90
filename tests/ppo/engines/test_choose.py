"""Which engine rollout.engine means, and when its weights are compared."""

from pathlib import Path

import pytest
import torch

from ppo.config import ENGINE_TRAITS, Config, RolloutConfig, load_config
from ppo.engines.choose import build_engine
from ppo.models.build import build_causal_lm
from ppo.models.tiny import build_tiny_model, build_tiny_tokenizer
from sharding.mesh import build_mesh, init_distributed


def load(*overrides: str) -> Config:
    return load_config("ppo_tiny.yaml", list(overrides))


def test_auto_is_sglang_where_there_are_cuda_and_its_package_and_torch_elsewhere():
    def everything(package: str) -> bool:
        return True

    def nothing(package: str) -> bool:
        return False

    auto = RolloutConfig()
    assert auto.engine_kind(cuda=True, installed=everything) == "sglang"
    assert auto.engine_kind(cuda=True, installed=nothing) == "torch"
    assert auto.engine_kind(cuda=False, installed=everything) == "torch"
    assert auto.engine_kind(cuda=False, installed=nothing) == "torch"
    for kind in ENGINE_TRAITS:
        assert RolloutConfig(engine=kind).engine_kind(cuda=False, installed=nothing) == kind


def test_auto_is_sglang_in_the_rank_on_a_cpu_and_in_its_own_process_on_cuda():
    auto = RolloutConfig()
    assert [auto.engine_process_kind(cuda=cuda) for cuda in (False, True)] == ["rank", "host"]
    for kind in ("rank", "host"):
        asked = RolloutConfig(engine_process=kind)
        assert {asked.engine_process_kind(cuda=cuda) for cuda in (False, True)} == {kind}


def test_the_check_and_the_start_mean_the_same_engine_by_auto_on_a_cpu(tmp_path: Path):
    config = load("rollout.engine=auto", "trainer.device=cpu")
    folder = build_tiny_model(tmp_path / "model")
    with init_distributed(torch.device("cpu")):
        mesh = build_mesh(config.dims(1, 1), torch.device("cpu"))
        module = build_causal_lm(
            folder,
            mesh,
            model_config=config.model,
            fsdp_config=config.actor.fsdp,
            checkpointing=False,
            forward_only=True,
            dtype=torch.float32,
        )
        engine = build_engine(
            config, mesh, module, build_tiny_tokenizer(), model_path=folder, run_dir=tmp_path
        )
        engine.close()
    assert type(engine).__name__ == "TorchEngine"
    assert config.planned_engine == "torch"
    assert load("rollout.engine=auto", "trainer.device=auto").planned_engine == "sglang"


@pytest.mark.parametrize(
    ("verify_weights", "verified"),
    [("never", []), ("first", [0]), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4])],
)
def test_weights_are_compared_never_after_the_first_sync_or_after_every_nth(
    verify_weights, verified
):
    rollout = RolloutConfig(verify_weights=verify_weights)
    assert [sync for sync in range(5) if rollout.verifies(sync)] == verified


def test_every_package_of_an_engine_is_an_extra_of_this_project():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    for traits in ENGINE_TRAITS.values():
        assert traits.package is None or traits.package in project["optional-dependencies"]
