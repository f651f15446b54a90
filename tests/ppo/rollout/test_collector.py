"""The order in which the collector wakes an engine, and when it gives a scoring up."""

import json
import re
import shutil
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config

from ppo.batch.packing import make_batcher
from ppo.batch.samples import Samples
from ppo.batch.shares import overview_of, share_out
from ppo.config import load_config
from ppo.data.dataset import Prompt
from ppo.engines.contract import Completion, Completions, SamplingParams
from ppo.errors import InputError
from ppo.forward_passes import response_logprobs
from ppo.metrics import Metrics
from ppo.models.build import build_causal_lm
from ppo.models.hf_config import vocabulary_of
from ppo.models.learner import Model
from ppo.models.tiny import build_tiny_model, build_tiny_tokenizer
from ppo.rewards.pool import RewardPool
from ppo.rollout.collector import (
    Collector,
    model_stop_token_ids,
    open_collector,
    warn_if_nothing_ends,
)
from ppo.rollout.prompts import load_prompts
from ppo.rollout.scoring import Scorer
from ppo.run.run import Run
from sharding.mesh import build_mesh, init_distributed
from tests.ppo.batches import make_samples
from tests.ppo.engines.drive import drive
from tests.ppo.models.hf_models import add_spare_rows


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
        "run": SimpleNamespace(drive=lambda work, **_: drive(work)),
        "actor": SimpleNamespace(on_device=on_device),
        "engine": Engine(),
        "tokenizer": None,
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
    samples = make_samples(prompts, [Completion([97], [0.0], "stop")] * 20)
    samples = replace(samples, texts=["a"] * 20)
    with init_distributed(torch.device("cpu")):
        mesh = build_mesh(config.dims(1, 1), torch.device("cpu"))
        pool = RewardPool(config.reward, log_path=tmp_path / "rewards.log")
        with Run(config, mesh, command=["test"]) as run, pool:
            scorer = Scorer(
                config=config,
                run=run,
                pool=pool,
                reward_model=None,
            )
            with pytest.raises(RuntimeError, match=r"failed for \d+ of 20 samples") as error:
                scorer.score(samples, Metrics())
    found = re.search(
        r"failed for (\d+) of 20 samples, more than reward.max_failed", str(error.value)
    )
    assert found is not None and 3 <= int(found[1]) < 10, error.value


def sampled_from(
    folder: Path, run_dir: Path, *overrides: str, begin: Any = lambda *_: None
) -> tuple[Samples, Tensor]:
    """Samples of the embedded engine from a model's folder, and their log-probs by the trainer."""
    config = load_config(
        "ppo_tiny.yaml",
        [
            f"model.path={folder}",
            "rollout.dtype=float32",
            "trainer.device=cpu",
            f"trainer.default_local_dir={run_dir}",
            *overrides,
        ],
    )
    mesh = build_mesh(config.dims(1, 1), torch.device("cpu"))
    with Run(config, mesh, command=[]) as run:
        vocabulary = vocabulary_of(folder, config.model)
        prompts = load_prompts(config, run, folder, vocabulary=vocabulary)
        module = build_causal_lm(
            folder,
            mesh,
            model_config=config.model,
            fsdp_config=config.actor.fsdp,
            checkpointing=False,
            forward_only=True,
            dtype=torch.float32,
            num_ids=prompts.num_ids,
        )
        actor = Model(module=module, device=mesh.device)
        some = [prompts.train[i] for i in range(8)]
        with (
            open_collector(config, run, prompts, actor) as collector,
            collector.awake(Metrics()),
        ):
            samples = collector.sample_training(some, Metrics(), 1, begin)
        overview, holders = overview_of(samples, mesh)
        batch = share_out(samples, overview, holders, torch.zeros_like(holders), mesh)
        logprobs = response_logprobs(
            module,
            batch,
            [list(range(len(batch)))],
            batcher=make_batcher(config, mesh, actor, tokens=4096),
            run=run,
            temperature=config.rollout.temperature,
        )
    return samples, logprobs[batch.response_mask]


def test_generation_config_says_how_responses_end_and_nothing_else(tmp_path):
    """Its sampling fields change no sample; where it is absent config.json has the same ids."""
    plain = build_tiny_model(tmp_path / "plain")
    folders = {name: shutil.copytree(plain, tmp_path / name) for name in ("warm", "bare")}
    path = folders["warm"] / "generation_config.json"
    fields = {"repetition_penalty": 5.0, "temperature": 0.01, "top_k": 1, "do_sample": True}
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    path = folders["bare"] / "generation_config.json"
    stops = json.loads(path.read_text())["eos_token_id"]
    assert len(stops) == 32
    path.unlink()
    path = folders["bare"] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": stops}))
    with init_distributed(torch.device("cpu")):
        want, _ = sampled_from(plain, tmp_path / "run")
        for name, folder in folders.items():
            got, _ = sampled_from(folder, tmp_path / f"run_{name}")
            assert (got.completions.ids == want.completions.ids).all(), name
            assert (got.completions.logprobs == want.completions.logprobs).all(), name
            assert got.completions.lengths == want.completions.lengths
    assert set(want.completions.finish_reasons) == {"stop", "length"}


def test_ids_that_the_tokenizer_does_not_have_are_never_sampled_and_have_no_probability(tmp_path):
    folder = add_spare_rows(build_tiny_model(tmp_path / "more_rows"), 64)
    with init_distributed(torch.device("cpu")):
        samples, logprobs = sampled_from(folder, tmp_path / "run")
    assert samples.completions.ids.max() < 512
    sampled = torch.from_numpy(samples.completions.logprobs)
    torch.testing.assert_close(sampled, logprobs, rtol=1e-5, atol=1e-5)


def test_the_ids_that_end_a_response_are_those_of_every_file(tmp_path):
    tokenizer = build_tiny_tokenizer()
    text = Qwen2Config(eos_token_id=[7, 8])
    config = SimpleNamespace(to_dict=lambda: {"eos_token_id": 3}, get_text_config=lambda: text)
    eos = tokenizer.eos_token_id
    assert model_stop_token_ids(tokenizer, tmp_path, config) == (3, 7, 8, eos)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5]}')
    assert model_stop_token_ids(tokenizer, tmp_path, config) == (3, 5, 7, 8, eos)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(InputError, match="'</s>' is no token id"):
        model_stop_token_ids(tokenizer, tmp_path, config)


def test_responses_that_no_token_can_end_are_said(caplog):
    warn_if_nothing_ends((511, 600), 512)
    assert not caplog.text
    warn_if_nothing_ends((512, 600), 512)
    assert "none of the ids that end a response, [512, 600], is one of the 512" in caplog.text


def test_a_response_is_valid_text_whatever_the_tokenizer_makes_of_it(monkeypatch):
    class Odd:
        def batch_decode(self, ids: list[list[int]], **options: Any) -> list[str]:
            assert ids == [[97]]
            return ["a\ud800b"]

    class Scores:
        def add(self, texts: Mapping[int, str]) -> None:
            told.append(dict(texts))

        def exchange(self) -> None:
            told.append("exchange")

    def generated(*_: Any, listener: Any, **options: Any) -> tuple[list[int], Completions]:
        completion = Completion([97], [0.0], "stop")
        listener.ended({0: completion})
        listener.exchange()
        listener.ended({})
        return [0], Completions.of([completion])

    told: list[Any] = []
    monkeypatch.setattr("ppo.rollout.collector.generate", generated)
    odd: Any = Odd()
    nothing: Any = None
    collector = Collector(
        config=nothing,
        run=nothing,
        actor=nothing,
        engine=nothing,
        tokenizer=odd,
        stop_token_ids=(),
    )
    prompts = [Prompt(0, [7], "any", None, {}, "")]
    params = SamplingParams(max_new_tokens=1)
    samples = collector.sample(prompts, params, 1, Metrics(), lambda *_: Scores())
    assert samples.texts == ["a?b"]
    assert told == [{0: "a?b"}, "exchange"]


def test_samples_are_told_while_others_are_still_generated(tmp_path):
    class Scores:
        def __init__(self) -> None:
            self.new, self.exchanged = 0, []

        def add(self, texts: Mapping[int, str]) -> None:
            self.new += len(texts)

        def exchange(self) -> None:
            self.exchanged.append(self.new)

    scores = Scores()
    folder = build_tiny_model(tmp_path / "model")
    with init_distributed(torch.device("cpu")):
        one_row = ("rollout.max_num_seqs=1",)
        samples, _ = sampled_from(folder, tmp_path / "run", *one_row, begin=lambda *_: scores)
    assert scores.exchanged[0] == 0 and scores.exchanged[-1] == len(samples) == 8
    assert len(set(scores.exchanged)) > 2  # some were told before the last had ended
