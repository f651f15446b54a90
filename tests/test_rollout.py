"""rollout.py: which requests are made, who makes them, and that every rank gets all completions."""

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import rollout
from ppo.config import load_config
from ppo.data.dataset import Prompt
from ppo.data.tokenizer import load_tokenizer
from ppo.engines.choose import build_engine
from ppo.engines.contract import Completion, SamplingParams
from ppo.metrics import Metrics
from ppo.models.tiny import build_tiny_model
from ppo.rollout.generate import Queues, generate, make_requests, spread
from ppo.run.run import Run
from sharding.mesh import build_mesh, init_distributed
from tests.distributed import run_distributed
from tests.ppo.engines.drive import Listed, each


def make_prompts(lengths: list[int], uids: list[int] | None = None) -> list[Prompt]:
    return [
        Prompt(
            uid=uid,
            prompt_ids=[1 + uid] * length,
            data_source="test",
            ground_truth="",
            extra_info={},
            messages="",
        )
        for length, uid in zip(lengths, uids or range(len(lengths)), strict=True)
    ]


def test_requests_are_prompt_major_with_one_uid_for_each_sample():
    requests = make_requests(make_prompts([2, 3, 4]), 2)
    assert [request.prompt_ids for request in requests] == [
        [1, 1], [1, 1], [2, 2, 2], [2, 2, 2], [3, 3, 3, 3], [3, 3, 3, 3],
    ]  # fmt: skip
    assert len({request.uid for request in requests}) == 6


def test_uids_depend_on_the_prompt_and_the_sample_alone():
    alone = make_requests(make_prompts([5], uids=[8]), 4)
    among_others = make_requests(make_prompts([1, 5, 2], uids=[3, 8, 1]), 2)
    assert [alone[0].uid, alone[1].uid] == [among_others[2].uid, among_others[3].uid]


def test_a_prompt_that_is_twice_in_a_batch_is_sampled_twice():
    requests = make_requests(make_prompts([5, 5, 5], uids=[8, 2, 8]), 3)
    assert len({request.uid for request in requests}) == 9


def test_samples_of_a_prompt_stay_together_where_the_loads_allow_it():
    shares = spread([10.0, 30.0, 20.0, 20.0], n=3, replicas=2)
    assert sorted(itertools.chain(*shares)) == list(range(12))
    assert {frozenset(i // 3 for i in share) for share in shares} == {
        frozenset({0, 1}),
        frozenset({2, 3}),
    }
    assert all(share[0] // 3 in (1, 2) for share in shares)  # the longer prompt first


def test_samples_of_a_prompt_are_divided_where_whole_prompts_would_be_uneven():
    shares = spread([10.0], n=4, replicas=4)
    assert sorted(shares) == [[0], [1], [2], [3]]
    shares = spread([10.0, 10.0, 10.0], n=2, replicas=2)
    assert sorted(map(len, shares)) == [3, 3]


def test_more_replicas_than_requests_leave_some_without_work():
    assert sorted(map(len, spread([5.0, 7.0], n=1, replicas=4))) == [0, 0, 1, 1]


def test_an_engine_without_work_takes_from_the_longest_queue():
    queues = Queues([[0, 1, 2, 3, 4, 5], [6], []])
    assert queues.hand_out([2, 2, 1]) == [[0, 1], [6, 5], [4]]
    assert queues.hand_out([0, 0, 0]) == [[], [], []]
    assert queues.hand_out([1, 5, 5]) == [[2], [3], []]
    assert queues.hand_out([9, 9, 9]) == [[], [], []]


def test_a_folder_is_no_file_for_samples(tmp_path, capfd):
    (tmp_path / "samples.jsonl").mkdir()
    words = ["--config", "ppo_tiny.yaml", "--data", "tiny"]
    assert rollout.main([*words, "--out", str(tmp_path / "samples.jsonl")]) == 2
    assert "--out = " in (err := capfd.readouterr().err) and "is a folder" in err


class Listener:
    """Every sample is heard of once, and an exchange follows."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.untold = False

    def ended(self, completions: Mapping[int, Completion]) -> None:
        self.heard += completions
        self.untold |= bool(completions)

    def exchange(self) -> None:
        self.untold = False
        dist.barrier()


def completions_of(rank: int, world_size: int, folder: Path, tp: int) -> list[tuple[int, Listed]]:
    """What this rank gets, with its numbers; prompts and replicas do not divide evenly."""
    config = load_config(
        None,
        [
            "model.path=tiny",
            "data.train_files=tiny",
            "trainer.device=cpu",
            "rollout.dtype=float32",
            "rollout.max_num_seqs=4",
            f"rollout.tensor_model_parallel_size={tp}",
            f"trainer.default_local_dir={folder / f'{world_size}-{tp}'}",
        ],
    )
    mesh = build_mesh(config.dims(world_size, world_size), torch.device("cpu"))
    model_folder = build_tiny_model(folder / "model")
    module = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    fully_shard(module, mesh=mesh.fsdp)
    tokenizer = load_tokenizer(model_folder)
    params = SamplingParams(max_new_tokens=20, seed=3, stop_token_ids=tuple(range(30)))
    with Run(config, mesh, command=[]) as run:
        engine = build_engine(
            config, mesh, module, tokenizer, model_path=model_folder, run_dir=run.dir
        )
        run.drive(engine.wake())
        prompts, metrics = make_prompts([3, 9, 4, 1, 6]), Metrics()
        listener = Listener()
        numbers, completions = generate(
            engine, prompts, params, n=3, run=run, metrics=metrics, listener=listener
        )
        assert sorted(listener.heard) == numbers and not listener.untold
        assert metrics.reduce(mesh.host_group)["rollout/tokens_per_s"] > 0
        engine.close()
    assert numbers == sorted(numbers)
    return list(zip(numbers, each(completions), strict=True))


def completions_on_three_meshes(
    rank: int, world_size: int, folder: Path
) -> list[list[tuple[int, Listed]]]:
    return [completions_of(rank, world_size, folder, tp) for tp in (1, 2, 4)]


@pytest.mark.distributed
def test_the_engines_make_together_the_completions_that_one_rank_would_make(tmp_path):
    with init_distributed(torch.device("cpu")):
        expected = [one for _, one in completions_of(0, 1, tmp_path, 1)]
    assert len(expected) == 15 and len({tuple(c.response_ids) for c in expected}) == 15
    ranks = run_distributed(completions_on_three_meshes, 4, tmp_path)
    for tp, meshes in zip((1, 2, 4), zip(*ranks, strict=True), strict=True):
        assert [len(part) > 0 for part in meshes] == [rank % tp == 0 for rank in range(4)]
        made = dict(pair for part in meshes for pair in part)
        assert sum(map(len, meshes)) == len(made) == 15
        for number, one in enumerate(expected):
            assert made[number].response_ids == one.response_ids
            assert made[number].finish_reason == one.finish_reason
            assert made[number].logprobs == pytest.approx(one.logprobs, abs=2e-5)
