"""Arguments, variables and memory of an engine: pure functions, nothing is started."""

import dataclasses
import importlib
import json
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Gemma3Config, Qwen2Config, Qwen3_5TextConfig

from ppo.config import Config, DataConfig, EpisodeConfig, ModelConfig, RolloutConfig
from ppo.engines.contract import Request, SamplingParams
from ppo.engines.sglang import args as sglang_args
from ppo.engines.sglang import host as sglang_host
from ppo.model_shapes import AttentionShape, KVCache
from sharding.mesh import ParallelDims

CACHE = KVCache(512, 512 * 57344, 256)


def hf_config(**values):
    return SimpleNamespace(get_text_config=lambda: SimpleNamespace(**values))


QWEN_7B = hf_config(
    num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, hidden_size=3584
)


def config(**rollout) -> Config:
    return Config(
        data=DataConfig(train_files=["tiny"]),
        model=ModelConfig(path="some/folder"),
        rollout=RolloutConfig(**{"max_model_len": 1024, **rollout}),
    )


def test_a_token_of_qwen_7b_takes_57344_bytes_and_never_less_than_one_head():
    # 2 x 28 layers x 4 heads x 128 x 2 bytes
    shape = AttentionShape.of(QWEN_7B)
    assert shape.kv_bytes_per_token(tp=1, itemsize=2) == 57344
    assert shape.kv_bytes_per_token(tp=4, itemsize=2) == 57344 // 4
    assert shape.kv_bytes_per_token(tp=8, itemsize=2) == 57344 // 4  # repeated


def test_the_kv_cache_is_what_the_share_of_the_card_leaves_beside_the_weights():
    card, share = 80 * 10**9, RolloutConfig(max_model_len=1024, gpu_memory_utilization=0.6)
    memory = sglang_args.plan_memory(
        share, QWEN_7B, parameters=7_600_000_000, device_bytes=card, on_cpu=False
    )
    assert memory.weight_bytes == 15_200_000_000
    assert memory.cache.bytes + memory.weight_bytes <= 0.6 * card
    assert memory.cache.bytes + memory.weight_bytes > 0.6 * card - 256 * 57344
    assert memory.cache.tokens == memory.cache.bytes // 57344 and memory.cache.tokens % 256 == 0


def test_on_a_cpu_the_kv_cache_is_no_larger_than_the_sequences_can_fill():
    rollout = RolloutConfig(max_model_len=120, max_num_seqs=10)
    memory = sglang_args.plan_memory(
        rollout, QWEN_7B, parameters=10**6, device_bytes=10**12, on_cpu=True
    )
    assert memory.cache.tokens == 1280  # 10 x (120 + 8)


def test_a_share_that_cannot_hold_one_sequence_is_refused_with_its_values():
    rollout = RolloutConfig(max_model_len=1024, gpu_memory_utilization=0.19)
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=0.19: of 74.5 GiB, beside 14.2"):
        sglang_args.plan_memory(
            rollout, QWEN_7B, parameters=7_600_000_000, device_bytes=80 * 10**9, on_cpu=False
        )


def test_a_hybrid_is_started_with_as_many_states_as_its_sequences_need():
    """SGLang would take half of what is free at the start for them, whatever our share is."""
    hybrid = Qwen3_5TextConfig(num_hidden_layers=8, linear_num_value_heads=16)
    # 6 of 8 layers: 16 heads x 128 x 128 in float32, 3 inputs of (2 x 16 + 16) x 128 channels
    state = 6 * (16 * 128 * 128 * 4 + 3 * 6144 * 2)

    def started(on_cpu: bool, **rollout) -> tuple[KVCache, dict]:
        options = {"gpu_memory_utilization": 0.3, "dtype": "bfloat16", **rollout}
        memory = sglang_args.plan_memory(
            config(**options).rollout,
            hybrid,
            parameters=10**9,
            device_bytes=20 * 10**9,
            on_cpu=on_cpu,
        )
        index = None if on_cpu else 0
        arguments = sglang_args.engine_arguments(
            config(**options), model_path="x", device_index=index, cache=memory.cache, seed=1
        )
        return memory.cache, arguments

    for on_cpu, rollout in ((False, {}), (False, {"max_num_seqs": 8}), (True, {})):
        cache, arguments = started(on_cpu, **rollout)
        assert arguments["max_mamba_cache_size"] == 5 * arguments["max_running_requests"]
        assert cache.bytes == cache.tokens * 2 * 2 * 4 * 256 * 2 + (cache.states + 1) * state
        assert cache.bytes <= 0.3 * 20e9 - 2e9 and cache.sequences < 256
    with pytest.raises(ValueError, match=r"states of 128 sequences, 0 tokens .*max_num_seqs=128"):
        started(False, max_num_seqs=128)
    plain = sglang_args.engine_arguments(
        config(), model_path="x", device_index=0, cache=CACHE, seed=1
    )
    assert "max_mamba_cache_size" not in plain


def test_every_rank_of_a_node_gets_cores_of_its_own_while_there_are_enough():
    def binding(rank: int, *, tp: int, ranks: int, cores: int) -> str:
        return sglang_args.thread_binding(
            list(range(cores)), local_rank=rank, tp=tp, ranks_per_node=ranks
        )

    assert binding(0, tp=2, ranks=4, cores=8) == "0,1|2,3"
    assert binding(2, tp=2, ranks=4, cores=8) == "4,5|6,7"
    assert binding(1, tp=1, ranks=2, cores=2) == "1"
    assert binding(2, tp=2, ranks=4, cores=2) == "0|1"


def test_engine_kwargs_are_passed_on_but_not_those_that_follow_from_other_keys():
    def arguments(**kwargs):
        return sglang_args.engine_arguments(
            config(engine_kwargs=kwargs), model_path="x", device_index=3, cache=CACHE, seed=1
        )

    made = arguments(attention_backend="fa3", mem_fraction_static=0.5)
    assert made["attention_backend"] == "fa3" and made["mem_fraction_static"] == 0.5
    assert made["base_gpu_id"] == 3 and made["max_total_tokens"] == 512
    with pytest.raises(ValueError, match="nccl_port, tp_size is set by the trainer"):
        arguments(tp_size=2, nccl_port=1)


def test_graphs_of_decoding_alone_stay_on_the_device_while_training():
    """SGLang takes the arguments on CUDA, and captures no prefill unless asked to."""
    server_args = pytest.importorskip("sglang.srt.server_args")
    hook = importlib.import_module("sglang.srt.arg_groups.cuda_graph_hook")

    def backends(**rollout):
        arguments = sglang_args.engine_arguments(
            config(**rollout), model_path="x", device_index=0, cache=CACHE, seed=1
        )
        parsed = server_args.ServerArgs(**arguments)
        hook.parse_cuda_graph_config(parsed)
        graphs = hook.resolving_view(parsed).cuda_graph_config
        return graphs.decode.backend, graphs.prefill.backend

    assert backends() == ("full", "disabled")
    assert backends(enforce_eager=True) == ("disabled", "disabled")
    assert backends(engine_kwargs={"cuda_graph_backend_prefill": "breakable"})[1] == "breakable"


def settings(rank: int, *, device: str = "cpu", deterministic: bool = False) -> dict[str, Any]:
    """Of an engine in ranks, of which there are 4 for 2 engines."""
    given = config(tensor_model_parallel_size=2)
    trainer = dataclasses.replace(given.trainer, deterministic=deterministic)
    return sglang_args.settings(
        dataclasses.replace(given, trainer=trainer),
        ParallelDims(world_size=4, ranks_per_node=4, rollout_tp=2),
        rank=rank,
        device=torch.device(device),
        process="rank",
        cache=CACHE,
        model_path="x",
        vocabulary={},
    )


def test_replicas_have_different_seeds_and_ranks_of_one_engine_the_same_settings():
    first, second, third, fourth = (settings(rank) for rank in range(4))
    assert first == second and third == fourth
    assert first["engine"]["random_seed"] != third["engine"]["random_seed"]


def test_deterministic_inference_would_be_the_trainers_too_in_its_rank():
    with pytest.raises(ValueError, match="engine_process=host"):
        settings(0, device="cuda", deterministic=True)


def test_the_host_hides_the_rendezvous_and_expandable_segments(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, value in {
        "RANK": "1",
        "MASTER_ADDR": "node",
        "TORCHELASTIC_RUN_ID": "7",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTHONPATH": "/mine",
        "NCCL_DEBUG": "WARN",
    }.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    try:
        sglang_host.prepare_environment({"A": "1"}, ["/first"])
        assert not {"RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PYTORCH_ALLOC_CONF"} & set(
            os.environ
        )
        assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
        assert os.environ["PYTHONPATH"].split(os.pathsep)[:2] == ["/first", "/mine"]
        assert os.environ["A"] == "1" and os.environ["NCCL_DEBUG"] == "WARN"
        assert sys.path[0] == "/first"
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.skipif(torch.version.cuda is None, reason="torch brings no CUDA runtime")
def test_workers_find_the_cuda_runtime_after_the_folders_of_the_user(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    sglang_host.expose_cuda_runtime()
    first, *folders = os.environ["LD_LIBRARY_PATH"].split(os.pathsep)
    assert first == "/mine" and folders
    assert all(list(Path(folder).glob("libcudart.so.*")) for folder in folders)


def test_a_reserved_port_is_given_to_nobody_else_and_can_be_bound_by_the_engine():
    holder, port = sglang_host.reserve_port()
    with holder:
        others = [sglang_host.reserve_port() for _ in range(200)]
        assert port not in {other for _, other in others}
        for other, _ in others:
            other.close()
        store = dist.TCPStore("localhost", port, 1, is_master=True)  # type: ignore[attr-defined]
        assert store.port == port
        with socket.socket() as stranger, pytest.raises(OSError):
            stranger.bind(("", port))


def test_how_to_sample_is_said_with_every_request_and_never_by_the_model():
    """generation_config.json may hold a repetition penalty, or that key's defaults may change."""
    theirs = pytest.importorskip("sglang.srt.sampling.sampling_params").SamplingParams
    params = SamplingParams(
        temperature=0.7, top_p=0.9, max_new_tokens=20, stop_token_ids=(5, 9), seed=1
    )
    sent = sglang_args.sampling_parameters(
        Request(7, [1, 2, 3]), params, max_model_len=16, seeded=False
    )
    # All that changes which token comes next, or when a response ends; the rest is its form.
    form = {"n", "beam_width", "spaces_between_special_tokens", "no_stop_trim", "stream_interval"}
    grammar = {"json_schema", "regex", "ebnf", "structural_tag", "stop_regex", "logit_bias"}
    other = {"sampling_seed", "custom_params", "watermark"}  # none where nothing is said
    internal = {name for name in theirs.__struct_fields__ if name.endswith(("_strs", "_len"))}
    known = set(theirs.__struct_fields__) - internal - {"is_normalized", "ebnf_full_assistant"}
    assert known - sent.keys() == form | grammar | other
    assert (sent["repetition_penalty"], sent["min_p"], sent["max_new_tokens"]) == (1.0, 0.0, 13)
    request = Request(7, [1, 2, 3], max_new_tokens=4, stop=("\n",))
    own = sglang_args.sampling_parameters(request, params, max_model_len=16, seeded=False)
    assert own == sent | {"max_new_tokens": 4, "stop": ["\n"]}


def test_an_engine_decodes_where_texts_may_end_a_response():
    def skips(**rollout):
        return sglang_args.engine_arguments(
            config(**rollout), model_path="x", device_index=3, cache=CACHE, seed=1
        )["skip_tokenizer_init"]

    assert skips()
    assert not skips(stop=["x"])
    assert not skips(episode=EpisodeConfig(path="game.py"))


def test_defaults_of_sampling_are_neither_the_models_nor_of_engine_kwargs():
    def arguments(**kwargs):
        return sglang_args.engine_arguments(
            config(engine_kwargs=kwargs), model_path="x", device_index=3, cache=CACHE, seed=1
        )

    assert arguments()["sampling_defaults"] == "openai"
    with pytest.raises(ValueError, match="preferred_sampling_params is set by the trainer"):
        arguments(preferred_sampling_params='{"repetition_penalty": 1.3}')


def test_the_engine_has_no_ids_that_the_tokenizer_lacks():
    qwen = Qwen2Config(vocab_size=152064)
    assert sglang_args.vocabulary_override(qwen, 152064) == {}
    assert sglang_args.vocabulary_override(qwen, 151665) == {"vocab_size": 151665}
    gemma = Gemma3Config(text_config={"vocab_size": 262208})
    vocabulary = sglang_args.vocabulary_override(gemma, 262145)
    assert vocabulary == {"text_config": {"vocab_size": 262145}}
    made = sglang_args.engine_arguments(
        config(), model_path="x", device_index=0, cache=CACHE, seed=1, vocabulary=vocabulary
    )
    assert json.loads(made["json_model_override_args"]) == vocabulary
