"""What an engine is started with: arguments of `sglang.Engine`, variables, size of its KV cache.

Pure functions, without sglang. Must not know: processes, weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ppo.config import Config, EngineProcess, RolloutConfig
from ppo.engines.contract import Request, SamplingParams
from ppo.model_shapes import (
    CONTEXT_MARGIN,
    AttentionShape,
    EngineMemory,
    KVCache,
    sglang_memory,
)
from sharding.dims import ParallelDims

LOADER = "ppo.engines.sglang.loader.load"
CPU_ENGINE = Path(__file__).resolve().parents[3] / "launch" / "cpu_engine"

OURS = frozenset(
    (
        *("model_path", "load_format", "dtype", "skip_tokenizer_init", "custom_weight_loader"),
        *("device", "base_gpu_id", "tp_size", "dp_size", "pp_size", "nnodes", "node_rank"),
        *("nccl_port", "random_seed", "max_total_tokens", "context_length", "enable_memory_saver"),
        "max_mamba_cache_size",
        *("sampling_defaults", "preferred_sampling_params"),
    )
)
"""arguments that follow from other keys, so that rollout.engine_kwargs may not have them"""


def plan_memory(
    rollout: RolloutConfig, hf_config: Any, *, parameters: int, device_bytes: int, on_cpu: bool
) -> EngineMemory:
    """Weights and KV cache of one rank of an engine for a model of so many parameters.

    `device_bytes` is a device's whole memory. Raises ValueError when the cache cannot hold one
    sequence.
    """
    memory = sglang_memory(
        AttentionShape.of(hf_config),
        num_params=parameters,
        itemsize=getattr(torch, rollout.dtype).itemsize,
        tp=rollout.tensor_model_parallel_size,
        device_bytes=device_bytes,
        utilization=rollout.gpu_memory_utilization,
        max_model_len=rollout.max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        on_cpu=on_cpu,
    )
    gib, context = 1024**3, rollout.max_model_len + CONTEXT_MARGIN
    if memory.cache.tokens < context:
        states = f" and the states of {memory.cache.sequences} sequences"
        lower = f", or lower rollout.max_num_seqs={rollout.max_num_seqs}"
        raise ValueError(
            f"rollout.gpu_memory_utilization={rollout.gpu_memory_utilization:g}: of "
            f"{device_bytes / gib:.1f} GiB, beside {memory.weight_bytes / gib:.1f} GiB of weights"
            f"{states if memory.cache.states else ''}, "
            f"{memory.cache.tokens} tokens of KV cache remain, less than one sequence of "
            f"{context}; raise it, or tensor_model_parallel_size"
            f"{lower if memory.cache.states and rollout.max_num_seqs else ''}"
        )
    return memory


def device_bytes(device: torch.device, ranks_per_node: int) -> int:
    """All memory of this rank's device; on a CPU, its share of the node's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_per_node


def settings(
    config: Config,
    dims: ParallelDims,
    *,
    rank: int,
    device: torch.device,
    process: EngineProcess,
    cache: KVCache,
    model_path: str,
    vocabulary: Mapping[str, Any],
) -> dict[str, Any]:
    """What an engine is started with: its arguments, variables, folders to import from.

    Raises ValueError for devices that cannot be seen, for engine_kwargs that are ours, and for what
    an engine in the rank would change for the trainer too.
    """
    cuda, tp = device.type == "cuda", dims.rollout_tp
    if cuda and process == "rank" and config.trainer.deterministic:
        raise ValueError(
            "trainer.deterministic with rollout.engine_process=rank: SGLang would replace the "
            "matrix products of this process, the trainer's too; use engine_process=host"
        )
    if cuda and process == "host" and torch.cuda.device_count() < tp:
        raise ValueError(
            f"rollout.tensor_model_parallel_size={tp}: rank {rank} sees "
            f"{torch.cuda.device_count()} devices; let every rank of a node see all of them "
            "(Slurm: --gpus-per-node, not --gpus-per-task)"
        )
    arguments = engine_arguments(
        config,
        model_path=model_path,
        device_index=torch.cuda.current_device() if cuda else None,
        cache=cache,
        vocabulary=vocabulary,
        seed=config.trainer.seed + 1_000_003 * (rank // tp),
    )
    if cuda and process == "rank":
        # without graphs nothing has addresses that must stay
        arguments["enable_memory_saver"] &= not config.rollout.enforce_eager
    if cuda:
        variables = environment(cpu_binding=None, tp=tp)
        return {"engine": arguments, "environment": variables, "first_on_path": []}
    binding = thread_binding(
        sorted(os.sched_getaffinity(0)),
        local_rank=(rank - rank % tp) % dims.ranks_per_node,
        tp=tp,
        ranks_per_node=dims.ranks_per_node,
    )
    return {
        "engine": arguments,
        "environment": environment(cpu_binding=binding, tp=tp),
        "first_on_path": [str(CPU_ENGINE)],
    }


def thread_binding(cores: list[int], *, local_rank: int, tp: int, ranks_per_node: int) -> str:
    """SGLANG_CPU_OMP_THREADS_BIND for the engine of a leader: one entry of cores per TP rank."""
    each = max(1, len(cores) // ranks_per_node)
    entries = []
    for rank in range(local_rank, local_rank + tp):
        taken = {cores[(rank * each + i) % len(cores)] for i in range(each)}
        entries.append(",".join(str(core) for core in sorted(taken)))
    return "|".join(entries)


def environment(*, cpu_binding: str | None, tp: int) -> dict[str, str]:
    """Variables of the host process and its children; `cpu_binding` set means the CPU engine."""
    variables = {
        # Trainers on other devices of the node hold different amounts of memory.
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
        # CONTEXT_MARGIN may exceed the model's own limit; positions never do.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if tp > 1:
        variables["SYNC_TOKEN_IDS_ACROSS_TP"] = "1"  # ranks sample each for itself otherwise
    if cpu_binding is not None:
        variables |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_NCCL_SO_PATH": "/nonexistent",
            "SGLANG_CPU_OMP_THREADS_BIND": cpu_binding,
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_COMPILE_DISABLE": "1",  # compiling small functions takes longer than tests
        }
    return variables


def engine_arguments(
    config: Config,
    *,
    model_path: str,
    device_index: int | None,
    cache: KVCache,
    seed: int,
    vocabulary: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Arguments of `sglang.Engine`, `rollout.engine_kwargs` included.

    `device_index` None is the CPU; `vocabulary` is `vocabulary_override`'s.
    Raises ValueError for engine_kwargs that follow from other keys.
    """
    rollout, model = config.rollout, config.model
    if refused := sorted(OURS & rollout.engine_kwargs.keys()):
        raise ValueError(f"rollout.engine_kwargs: {', '.join(refused)} is set by the trainer")
    arguments: dict[str, Any] = {
        "model_path": model_path,
        "tokenizer_path": None if model.tokenizer_path == model.path else model.tokenizer_path,
        "trust_remote_code": model.trust_remote_code,
        # Texts that end a response are found in text: only then does the engine detokenize.
        "skip_tokenizer_init": not rollout.knows_stop_texts,
        "load_format": "dummy",
        "custom_weight_loader": [LOADER],
        "dtype": rollout.dtype,
        "tp_size": rollout.tensor_model_parallel_size,
        "context_length": rollout.max_model_len + CONTEXT_MARGIN,
        "max_running_requests": cache.sequences,
        "chunked_prefill_size": rollout.max_num_batched_tokens,
        "max_total_tokens": cache.tokens,
        "random_seed": seed,
        # How to sample is said with each request, never by a model's generation_config.json.
        "sampling_defaults": "openai",
        "sleep_on_idle": True,
        "watchdog_timeout": rollout.timeout_s,
        "log_level": "info",
    }
    if cache.states:  # else SGLang takes half of what is free at the start, whatever our share is
        arguments["max_mamba_cache_size"] = cache.states
    if override := {**model.override_config, **(vocabulary or {})}:
        arguments["json_model_override_args"] = json.dumps(override)
    if device_index is None:
        arguments |= _cpu_arguments()
    else:
        arguments |= _cuda_arguments(config, device_index)
    return arguments | rollout.engine_kwargs


def vocabulary_override(hf_config: Any, num_ids: int) -> dict[str, Any]:
    """Keys of the model's configuration with which the engine has `num_ids` ids; {} = as it is.

    A head may have more rows than the tokenizer has ids. An engine without those rows neither
    samples such an id nor counts it in a log-prob, at no cost.
    """
    text = hf_config.get_text_config()
    if num_ids >= text.vocab_size:
        return {}
    sections = [name for name, value in vars(hf_config).items() if value is text]
    keys = {"vocab_size": num_ids}
    return {sections[0]: keys} if sections else keys


def sampling_parameters(
    request: Request, params: SamplingParams, *, max_model_len: int, seeded: bool
) -> dict[str, Any]:
    """SGLang's sampling parameters of one request, each that changes a distribution said.

    seeded: with a seed of its own for every sample.
    """
    most = params.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
    stop = params.stop if request.stop is None else request.stop
    sampling = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        # What our keys do not have is off: log-probs would be those of another distribution.
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "max_new_tokens": min(most, max_model_len - len(request.prompt_ids)),
        "stop": list(stop) or None,
        "stop_token_ids": list(params.stop_token_ids) or None,
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": False,
    }
    if seeded:
        key = hash((params.seed, params.step, request.uid))  # of integers: no random salt
        sampling["sampling_seed"] = key & 0x7FFFFFFF
    return sampling


def _cpu_arguments() -> dict[str, Any]:
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.8,
    }


def _cuda_arguments(config: Config, index: int) -> dict[str, Any]:
    return {
        "device": "cuda",
        "base_gpu_id": index,
        "enable_memory_saver": config.rollout.free_cache_engine,
        "disable_cuda_graph": config.rollout.enforce_eager,
        # Graphs of whole prefills would keep their activations on the device while training.
        "cuda_graph_backend_prefill": "disabled",
        # A share of what is free at the start, not of the card: max_total_tokens decides instead.
        "mem_fraction_static": 0.97,
        # Per-sample seeds, which rollout.py gives, have no effect without it.
        "enable_deterministic_inference": config.trainer.deterministic,
    }
