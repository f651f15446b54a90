"""Advice about memory is true: what it says is tried, and is not what is set already."""

import re

import pytest

from ppo.check.preflight import run_check
from ppo.config import parse_args

BOTH_OFFLOADS = [
    "actor.fsdp.optimizer_offload=true", "actor.fsdp.param_offload=true",
]  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ["model.path=Qwen/Qwen2.5-1.5B-Instruct", "--nproc_per_node=1", "--device_memory_gib=24",
         "rollout.gpu_memory_utilization=0.3", *BOTH_OFFLOADS],
        ["model.path=Qwen/Qwen2.5-7B-Instruct", "--nproc_per_node=2"],
        ["model.path=Qwen/Qwen2.5-7B-Instruct", "--device_memory_gib=20"],
        ["model.path=Qwen/Qwen2.5-7B-Instruct", "rollout.gpu_memory_utilization=0.1"],
        ["model.path=Qwen/Qwen2.5-0.5B-Instruct", "--nproc_per_node=1", "--device_memory_gib=16",
         "actor.fsdp.offload_policy=true", "actor.ppo_max_token_len_per_gpu=65536",
         "model.enable_gradient_checkpointing=false"],
        ["model.path=Qwen/Qwen2.5-72B-Instruct", "--nproc_per_node=8"],
        ["model.path=Qwen/Qwen2.5-32B-Instruct", "--nnodes=4", "actor.fsdp.fsdp_size=8"],
        ["model.path=Qwen/Qwen2.5-32B-Instruct", "actor.fsdp.sharding_strategy=NO_SHARD"],
        ["model.path=Qwen/Qwen2.5-14B-Instruct", "--nnodes=4", "actor.fsdp.fsdp_size=8",
         "actor.fsdp.sharding_strategy=HYBRID_SHARD"],
    ],
)  # fmt: skip
def test_advice_makes_it_fit_and_never_repeats_what_is_set(capsys, arguments):
    base = ["--config", "ppo.yaml", "--check", *arguments]
    assert run_check(parse_args(base)) == 2
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith("does not fit: ") or "KV cache of 0 tokens" in err
    (advice,) = [line.partition("; it fits ")[2] for line in err.splitlines() if "it fits" in line]
    ranks = re.match(r"on (\d+) ranks", advice)
    settings = re.findall(r"\S+=\S+", advice)
    assert settings or ranks
    assert not set(settings) & set(arguments)
    nodes = [f"--nnodes={int(ranks[1]) // 8}"] if ranks else []
    assert run_check(parse_args([*base, *settings, *nodes])) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("fits: ")


GRPO_32B = [
    "--config", "grpo_qwen2.5_7b_gsm8k.yaml", "--check", "model.path=Qwen/Qwen2.5-32B-Instruct",
    "--nnodes=4",
]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (["rollout.tensor_model_parallel_size=4"], "actor.fsdp.fsdp_size=16"),
        ([], "actor.fsdp.fsdp_size=16 rollout.tensor_model_parallel_size=2"),
    ],
)
def test_a_shard_group_that_is_too_small_is_named_before_offload(capsys, settings, advice):
    arguments = [*GRPO_32B, "actor.fsdp.fsdp_size=8", *settings]
    assert run_check(parse_args(arguments)) == 2
    assert f"; it fits with {advice}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "size", "reason"),
    [
        (["--config", "ppo.yaml", "--check", "--nnodes=4"], 8, "where every phase fits"),
        ([*GRPO_32B, "rollout.tensor_model_parallel_size=4"], 16, "the smallest larger group"),
        (GRPO_32B, 32, "no larger group fits either"),
        ([*GRPO_32B, "actor.fsdp.sharding_strategy=HYBRID_SHARD"], 16, "no larger group"),
        ([*GRPO_32B, "trainer.device=cpu"], 8, None),
        (["--config", "ppo.yaml", "--check", "--nnodes=4", "actor.fsdp.fsdp_size=16"], 16, None),
        (["--config", "ppo.yaml", "--check"], 8, None),
    ],
)
def test_a_shard_size_that_is_left_open_is_the_nodes_where_that_fits(
    capsys, arguments, size, reason
):
    run_check(parse_args(arguments))
    out = capsys.readouterr().out
    assert f"shards over {size} ranks" in out
    assert (f"actor.fsdp.fsdp_size = -1 is {size} of" in out) == (reason is not None)
    assert reason is None or reason in out
