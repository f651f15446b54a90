"""Whether engine and trainer agree: a prompt longer than the windows, scored by both."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from ppo.config import load_config
from ppo.engines.agreement import RESPONSE, Probe, check_agreement, probe_length, score
from ppo.engines.choose import build_engine
from ppo.errors import InputError
from ppo.models.build import build_causal_lm
from ppo.models.learner import Model
from ppo.models.roles import build_options
from ppo.models.tiny import build_tiny_tokenizer
from sharding.mesh import build_mesh, init_distributed
from tests.distributed import run_distributed
from tests.ppo.engines.drive import drive
from tests.ppo.models.hf_models import save_model

CPU = torch.device("cpu")


def opened(folder: Path, world_size: int, *words: str) -> tuple[Any, ...]:
    """Configuration, mesh, actor and embedded engine for a model with windows of 6 tokens."""
    path = folder / "model"
    config = load_config("ppo_tiny.yaml", [f"model.path={path}", *words])
    mesh = build_mesh(config.dims(world_size, world_size), CPU)
    options = build_options(config, config.models["actor"])
    actor = Model(module=build_causal_lm(path, mesh, **options), device=CPU)
    engine = build_engine(
        config, mesh, actor.module, build_tiny_tokenizer(), model_path=path, run_dir=folder
    )
    return config, mesh, actor, engine


def test_an_engine_with_other_weights_is_an_error_in_float32_and_said_once_otherwise(
    tmp_path, caplog
):
    save_model(tmp_path / "model", "mistral", vocab_size=512)
    with init_distributed(CPU):
        config, mesh, actor, engine = opened(tmp_path, 1)
        half = replace(config, rollout=replace(config.rollout, dtype="bfloat16"))
        agrees, differs, rounds = (Probe(c, mesh, actor) for c in (config, config, half))
        drive(engine.wake())
        for probe in (agrees, differs, rounds):
            drive(probe.ask(engine))
        engine.release()
        agrees.check()
        whole = [n for n, p in actor.module.named_parameters() if not isinstance(p, DTensor)]
        assert whole == []  # the root's would stay gathered until the next pass
        with torch.no_grad():
            for parameter in actor.module.parameters():
                parameter.mul_(2)
        agrees.check()  # it has been asked
        with pytest.raises(
            InputError, match=r"torch: its log-probs of 8 tokens after a prompt of 14"
        ):
            differs.check()
        rounds.check()
        assert caplog.text.count("rounding does not explain that") == 1


def test_the_first_step_of_a_run_in_float32_shows_a_difference(tmp_path):
    config = load_config("ppo_tiny.yaml", [])
    mesh: Any = SimpleNamespace(device=CPU)
    metric = "training/rollout_probs_diff_max"
    for fine in ({}, {metric: 1e-5}, {metric: float("nan")}):
        check_agreement(config, fine, mesh)
    with pytest.raises(InputError, match="both compute in float32"):
        check_agreement(config, {metric: 0.02}, mesh)
    half = load_config("ppo_tiny.yaml", ["rollout.dtype=bfloat16"])
    check_agreement(half, {metric: 0.02}, mesh)


def test_the_prompt_is_longer_than_a_window_that_a_sequence_reaches():
    assert probe_length(SimpleNamespace(sliding_window=100), 4096) == 108
    assert probe_length(SimpleNamespace(sliding_window=5000), 4096) == 32
    assert probe_length(SimpleNamespace(sliding_window=None, attention_chunk_size=50), 4096) == 58
    assert probe_length(SimpleNamespace(), 20) == 12
    assert probe_length(SimpleNamespace(), 4) == 1


def scored(rank: int, world_size: int, folder: str) -> list[list[float]]:
    found = []
    for sp in (1, 2):
        words = [f"actor.ulysses_sequence_parallel_size={sp}"]
        _, mesh, actor, _ = opened(Path(folder), world_size, *words)
        own = score(actor.module, list(range(14)), list(range(RESPONSE - 1)), mesh)
        found.append(own.tolist())
    return found


@pytest.mark.full
@pytest.mark.distributed
def test_scores_are_those_of_transformers_over_sp_ranks(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path / "model", "mistral", vocab_size=512)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[*range(14), *range(RESPONSE - 1)]])
    with torch.no_grad():
        table = model(input_ids=ids).logits[0, 13:-1].log_softmax(-1)
    want = table.gather(1, ids[0, 14:, None])[:, 0].tolist()
    for rank in run_distributed(scored, 2, str(tmp_path)):
        for own in rank:
            assert own == pytest.approx(want, abs=1e-4)
