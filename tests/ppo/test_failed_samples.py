"""A sample that failed is as if it had never been: loss and gradient are those of the others."""

from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from ppo.batch.packing import Batcher
from ppo.batch.samples import RolloutBatch
from ppo.config import Config, LossAggMode, load_config
from ppo.data.dataset import Prompt
from ppo.engines.contract import Completion
from ppo.guards.guard import Guard
from ppo.metrics import Metrics
from ppo.models.build import build_causal_lm, build_value_model
from ppo.models.learner import Learner
from ppo.policy_losses import POLICY_LOSSES
from ppo.update import update_actor, update_critic
from sharding.mesh import Mesh, build_mesh, init_distributed
from sharding.partition import Budget
from tests.ppo.batches import make_batch, without
from tests.ppo.models.hf_models import VOCAB, save_model
from tests.ppo.test_update import Recorder

LENGTHS = [5, 1, 9, 7, 3, 8, 2, 6]
MODES = get_args(LossAggMode)


def batch_with_a_failure(failed: int) -> RolloutBatch:
    """Eight samples; what is known of the one that failed is NaN."""
    g = torch.Generator().manual_seed(8)
    prompts = [Prompt(uid, [7, 8 + uid], "", None, {}, "") for uid in range(4)]
    completions = [
        Completion(torch.randint(3, VOCAB, (n,), generator=g).tolist(), [0.0] * n, "stop")
        for n in LENGTHS
    ]
    batch = make_batch(prompts, completions, failed=[failed])

    def noise(mean: float) -> torch.Tensor:
        values = mean + torch.randn(batch.response_mask.shape, generator=g)
        return torch.where(batch.response_mask, values, torch.nan)

    near = -torch.tensor(VOCAB).log().item()
    batch.old_logprobs, batch.ref_logprobs = noise(near), noise(near)
    batch.advantages, batch.values, batch.returns = noise(0.0), noise(0.0), noise(0.0)
    batch.loss_weights = noise(0.0).abs()
    return batch


def config_of(mode: str, loss_mode: str) -> Config:
    overrides = {
        "actor.loss_agg_mode": mode,
        "actor.policy_loss.loss_mode": loss_mode,
        **{f"actor.policy_loss.{name}_cov_ratio": 0.2 for name in ("clip", "kl")},
        **{"actor.policy_loss.clip_cov_lb": -9, "actor.policy_loss.clip_cov_ub": 9},
        **{"actor.use_kl_loss": True, "actor.entropy_coeff": 0.05, "actor.grad_clip": 1e9},
    }
    return load_config("ppo_tiny.yaml", [f"{k}={v}" for k, v in overrides.items()])


def outcome(
    update: Any, module: Any, batch: RolloutBatch, config: Config, mesh: Mesh
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    optimizer, metrics = Recorder(module), Metrics()
    learner = Learner(
        name="model",
        module=module,
        device=mesh.device,
        optimizer=optimizer,
        optim=config.actor.optim,
        grad_clip=1e9,
        total_steps=1,
    )
    batcher = Batcher(mesh=mesh, budget=Budget(dp=1, tokens=1000), packed=True)
    update(learner, batch, config, batcher, metrics, 1, Guard())
    [gradient] = optimizer.steps
    return metrics.reduce(mesh.host_group), gradient


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = save_model(tmp_path_factory.mktemp("model") / "model", "qwen2")
    config = load_config("ppo_tiny.yaml")
    with init_distributed(torch.device("cpu")):
        mesh = build_mesh(config.dims(1, 1), torch.device("cpu"))
        built = [
            kind(
                path,
                mesh,
                model_config=config.model,
                fsdp_config=config.actor.fsdp,
                checkpointing=False,
                forward_only=False,
                dtype=torch.float32,
            )
            for kind in (build_causal_lm, build_value_model)
        ]
        yield mesh, *built


@pytest.mark.parametrize(("loss_mode", "mode"), [*product(POLICY_LOSSES, MODES)])
def test_one_failed_sample_of_eight_leaves_the_policy_update_of_the_other_seven(
    models, loss_mode, mode
):
    mesh, actor, _ = models
    failed = 7 if loss_mode == "clip_cov" else 3  # its lots are drawn by the number of a sample
    assert_equal_without(failed, update_actor, actor, config_of(mode, loss_mode), mesh, "pg_loss")


@pytest.mark.parametrize("mode", MODES)
def test_one_failed_sample_of_eight_leaves_the_value_update_of_the_other_seven(models, mode):
    mesh, _, critic = models
    assert_equal_without(3, update_critic, critic, config_of(mode, "vanilla"), mesh, "vf_loss")


def assert_equal_without(
    failed: int, update: Any, module: Any, config: Config, mesh: Mesh, loss: str
) -> None:
    values, gradient = outcome(update, module, batch_with_a_failure(failed), config, mesh)
    seven = without(batch_with_a_failure(failed), failed)
    assert len(seven.all) == 7 and not seven.all.failed.any()
    want, wanted = outcome(update, module, seven, config, mesh)
    [name] = [name for name in values if name.endswith(loss)]
    assert values[name] == pytest.approx(want[name], rel=1e-6)
    assert values["model/grad_norm"] == pytest.approx(want["model/grad_norm"], rel=1e-6)
    assert values["model/grad_norm"] > 0
    for parameter, found in gradient.items():
        torch.testing.assert_close(found, wanted[parameter], rtol=1e-5, atol=1e-7)
