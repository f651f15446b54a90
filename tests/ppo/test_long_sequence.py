"""A sequence of 32k tokens: sp = 4 trains it in memory that the preflight refuses to sp = 1."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ppo.batch.packing import Batcher
from ppo.check.memory_phases import GIB, phases
from ppo.check.preflight import find_models, plan_of, run_check
from ppo.config import Config, load_config, parse_args
from ppo.data.dataset import Prompt
from ppo.engines.contract import Completion
from ppo.guards.guard import Guard
from ppo.metrics import Metrics
from ppo.models.build import build_causal_lm
from ppo.models.learner import Learner, make_optimizer
from ppo.models.tiny import build_tiny_model
from ppo.update import update_actor
from sharding.mesh import build_mesh
from sharding.partition import Budget
from tests.distributed import run_distributed
from tests.peak_memory import PeakTracker
from tests.ppo.batches import make_batch, rows_here

LENGTH = 32_768
LIMIT_GIB = 0.0625  # of live tensors of a rank, in every phase of an iteration
OVERRIDES = [
    f"data.max_response_length={LENGTH - 32}",  # after a prompt of up to 32
    "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=4",
    "algorithm.adv_estimator=grpo",
    "rollout.n=2",
    "rollout.max_num_seqs=1",
]
SP = "actor.ulysses_sequence_parallel_size=4"


def train_one(rank: int, world_size: int, folder: Path) -> dict[str, float]:
    """One update on a long and three short sequences: its metrics, and the peak in bytes."""
    config = load_config("ppo_tiny.yaml", [*OVERRIDES, SP])
    mesh = build_mesh(config.dims(world_size, world_size), torch.device("cpu"))
    module = build_causal_lm(
        folder,
        mesh,
        model_config=config.model,
        fsdp_config=config.actor.fsdp,
        checkpointing=config.model.enable_gradient_checkpointing,
        forward_only=False,
        dtype=torch.float32,
    )
    actor = Learner(
        name="actor",
        module=module,
        device=mesh.device,
        optimizer=make_optimizer(module, config.actor.optim, mesh.device),
        optim=config.actor.optim,
        grad_clip=config.actor.grad_clip,
        total_steps=1,
    )
    budget = Budget(
        dp=mesh.dims.dp,
        tokens=config.actor.ppo_max_token_len_per_gpu * mesh.dims.sp,
        hidden_size=actor.hf_config.hidden_size,
    )
    batcher = Batcher(mesh=mesh, budget=budget, packed=True)
    metrics = Metrics()
    with PeakTracker(mesh.device) as tracker:
        tracker.watch(module.parameters())
        batch = rows_here(long_batch(), mesh.dims.dp, mesh.dp_rank)
        update_actor(actor, batch, config, batcher, metrics, 1, Guard())
    metrics.maximum("peak_bytes", tracker.peak_bytes)
    return metrics.reduce(mesh.host_group)


def long_batch() -> Any:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (LENGTH,), generator=g).tolist()
    prompts = [Prompt(uid, ids[: 32 - uid], "", None, {}, "") for uid in range(2)]
    responses = [ids[32:], ids[:5], ids[:9], ids[:1]]
    batch = make_batch(prompts, [Completion(r, [0.0] * len(r), "length") for r in responses])
    batch.old_logprobs = torch.full(batch.response_mask.shape, -torch.tensor(512.0).log().item())
    batch.ref_logprobs = batch.old_logprobs
    batch.advantages = torch.randn(batch.response_mask.shape, generator=g)
    return batch


def predicted_bytes(config: Config) -> float:
    """The preflight's peak of `train actor`."""
    plan = plan_of(config, config.dims(4, 4), find_models(config).shapes)
    return next(phase.bytes for phase in phases(plan) if phase.name == "train actor")


def test_the_preflight_refuses_32k_tokens_to_one_rank_and_allows_them_to_four(capsys):
    arguments = ["--config", "ppo_tiny.yaml", "--check", "--nproc_per_node=4"]
    arguments += [f"--device_memory_gib={LIMIT_GIB}", *OVERRIDES]
    assert run_check(parse_args(arguments)) == 2
    report = capsys.readouterr().err
    assert "train actor needs" in report
    advice = report.partition("it fits with ")[2].splitlines()[0].split()
    assert any(word.startswith("actor.ulysses_sequence_parallel_size=") for word in advice)
    for words in (advice, [SP]):
        assert run_check(parse_args([*arguments, *words])) == 0


@pytest.mark.full
@pytest.mark.distributed
def test_four_ranks_train_a_sequence_of_32k_tokens_within_that_memory(tmp_path):
    results = run_distributed(train_one, 4, build_tiny_model(tmp_path / "tiny"), timeout_s=600)
    assert results[0]["peak_bytes"] < LIMIT_GIB * GIB
    assert 0 < results[0]["actor/grad_norm"] < float("inf")
    assert results[0]["actor/ppo_kl"] != 0
    predicted = predicted_bytes(load_config("ppo_tiny.yaml", [*OVERRIDES, SP]))
    assert 0.9 < predicted / results[0]["peak_bytes"] < 1.25
