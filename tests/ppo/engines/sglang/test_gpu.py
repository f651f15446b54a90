"""SGLang in its own process on real GPUs: memory given back, CUDA graphs, IPC handles, the size of
the KV cache.

Ready to run, and not yet run by us: `pytest -m gpu tests/ppo/engines/sglang/test_gpu.py`.
"""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.spawn import start_processes

from ppo.config import Config, DataConfig, ModelConfig, RolloutConfig
from ppo.engines.contract import Request, SamplingParams
from ppo.engines.sglang.engine import SGLangEngine
from sharding.fsdp import shard_model, without_gradients
from sharding.mesh import ParallelDims, build_mesh, init_distributed
from tests.ppo.engines.drive import drive, generate

pytestmark = [pytest.mark.gpu, pytest.mark.sglang, pytest.mark.timeout(1800)]

GIB = 1024**3
CYCLES = 3
# What contexts, workspaces and the caching allocator may keep beside weights and cache.
SLACK = 0.5 * GIB
# bfloat16 kernels of SGLang and of transformers: mean over the tokens of |difference of log-probs|.
MEAN_DIFFERENCE = 0.03


def devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen2(tmp_path_factory.mktemp("model") / "qwen2")


def save_qwen2(path: Path) -> Path:
    """A random Qwen2 of about 0.5 billion parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("enforce_eager", "allocator"),
    [(False, ""), (True, "expandable_segments:True")],
    ids=["cuda_graphs", "eager-expandable_segments"],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_memory_comes_and_goes_and_weights_follow_the_trainer(
    tp: int,
    enforce_eager: bool,
    allocator: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    if devices() < tp:
        pytest.skip(f"needs {tp} CUDA devices")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", allocator)
    arguments = (tp, str(folder), enforce_eager, f"file://{tmp_path}/rendezvous")
    start_processes(_rank, args=arguments, nprocs=tp)


def _rank(rank: int, tp: int, folder: str, enforce_eager: bool, init_method: str) -> None:
    device = torch.device("cuda", rank)
    with init_distributed(device, rank=rank, world_size=tp, timeout_s=600, init_method=init_method):
        _session(rank, tp, folder, enforce_eager, device)


def _session(rank: int, tp: int, folder: str, enforce_eager: bool, device: torch.device) -> None:
    from transformers import AutoModelForCausalLM

    mesh = build_mesh(
        ParallelDims(world_size=tp, ranks_per_node=tp, rollout_tp=tp).resolve(), device
    )
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    torch.nn.Module.to(module, device)
    shard_model(module, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    config = Config(
        data=DataConfig(train_files=["tiny"]),
        model=ModelConfig(path=folder),
        rollout=RolloutConfig(
            engine_process="host",
            tensor_model_parallel_size=tp,
            gpu_memory_utilization=0.5,
            max_model_len=1024,
            enforce_eager=enforce_eager,
            verify_weights=1,  # IPC handles carried every weight, or this raises
            reshard_bucket_mib=128,
        ),
    )
    logs = Path(folder).parent / f"logs_{tp}_{enforce_eager}"
    engine = SGLangEngine(config, mesh, module, model_path=folder, log_dir=logs)
    try:
        drive(engine.start())  # fails if the KV cache is smaller than asked
        asked = engine._memory.weight_bytes + engine._memory.cache.bytes
        total = torch.cuda.get_device_properties(device).total_memory
        assert 0.49 * total < asked <= 0.5 * total
        released = []
        for cycle in range(CYCLES):
            before = free_bytes(device)
            drive(engine.wake())
            if cycle > 0:  # the first wake loads kernels and makes NCCL's communicators
                assert abs(before - free_bytes(device) - asked) < SLACK
            check_agreement(engine, module, device)
            engine.release()
            change_weights(module, cycle)
            released.append(free_bytes(device))
        assert max(released) - min(released) < SLACK  # nothing is lost from cycle to cycle
        assert total - released[-1] < 0.5 * asked  # and both sides' contexts are all that is left
    finally:
        engine.close()
    deadline = time.monotonic() + 60  # the driver takes back what killed processes held
    while free_bytes(device) <= released[-1]:
        assert time.monotonic() < deadline
        time.sleep(0.5)


def free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


@torch.no_grad()
def change_weights(module: nn.Module, cycle: int) -> None:
    for parameter in module.parameters():
        parameter.mul_(1 + 0.02 * (cycle + 1))


@torch.no_grad()
def check_agreement(engine: SGLangEngine, module: Any, device: torch.device) -> None:
    """The engine's log-probs are those of the sharded model, after every sync."""
    prompts = [[100 + i, 7, 9, 2000 + i] for i in range(8)]
    params = SamplingParams(max_new_tokens=64, temperature=0.8, ignore_eos=True)
    work = generate(engine, [Request(i, p) for i, p in enumerate(prompts)], params)
    shared: list[Any] = [drive(work).completions]
    torch.distributed.broadcast_object_list(shared, src=0)
    differences = []
    for prompt, (ids, logprobs, _) in zip(prompts, shared[0], strict=True):
        with without_gradients(module):
            logits = module(torch.tensor([prompt + ids], device=device)).logits[0]
        rows = (logits[len(prompt) - 1 : -1].float() / 0.8).log_softmax(-1)
        expected = rows.gather(1, torch.tensor(ids, device=device)[:, None])[:, 0]
        differences.append((expected - torch.tensor(logprobs, device=device)).abs())
    assert torch.cat(differences).mean().item() < MEAN_DIFFERENCE
