"""What an engine is started with: arguments of `sglang.Engine`, variables, size of its KV cache.

Pure functions, without sglang. Must not know: processes, weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from ppo.config.sections import RolloutConfig

LOADER = "ppo.engines.sglang_loader.load"
CPU_ENGINE = Path(__file__).resolve().parents[2] / "launch" / "cpu_engine"

# The engine counts its last token and a reserve into the context; prompt + response never exceed
# rollout.max_model_len.
CONTEXT_MARGIN = 8
KV_PAGE = 256  # a multiple of every page size of SGLang's attention backends

OURS = frozenset(
    (
        *("model_path", "load_format", "dtype", "skip_tokenizer_init", "custom_weight_loader"),
        *("device", "base_gpu_id", "tp_size", "dp_size", "pp_size", "nnodes", "node_rank"),
        *("nccl_port", "random_seed", "max_total_tokens", "context_length", "enable_memory_saver"),
    )
)
"""arguments that follow from other keys, so that rollout.engine_kwargs may not have them"""


def kv_bytes_per_token(hf_config: Any, *, tp: int, itemsize: int) -> int:
    """Bytes that one token takes in the KV cache of one rank.

    Keys and values of every layer; a rank holds kv_heads / tp heads, or one that others hold too.
    """
    text = hf_config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * -(-heads // tp) * head_dim * itemsize


def kv_cache_tokens(
    *, device_bytes: int, utilization: float, weight_bytes: int, token_bytes: int, context: int
) -> int:
    """Tokens that fit into what the engine's share of a device leaves beside its weights.

    Raises ValueError when that is less than one sequence of `context` tokens.
    """
    gib = 1024**3
    tokens = int(utilization * device_bytes - weight_bytes) // token_bytes // KV_PAGE * KV_PAGE
    if tokens < context:
        raise ValueError(
            f"rollout.gpu_memory_utilization={utilization:g}: of {device_bytes / gib:.1f} GiB, "
            f"beside {weight_bytes / gib:.1f} GiB of weights, {max(tokens, 0)} tokens of KV cache "
            f"remain, less than one sequence of {context}; raise it, or tensor_model_parallel_size"
        )
    return tokens


class Memory(NamedTuple):
    """What the engine takes of each of its devices when it is awake."""

    weight_bytes: int
    kv_bytes: int
    kv_tokens: int


def plan_memory(
    rollout: RolloutConfig, hf_config: Any, *, parameters: int, device_bytes: int, on_cpu: bool
) -> Memory:
    """Weights and KV cache of one rank of an engine for a model of so many parameters.

    `device_bytes` is a device's whole memory. On a CPU, where it is not the engine's alone, the
    cache is no larger than rollout.max_num_seqs sequences can fill.
    Raises ValueError when the cache cannot hold one sequence.
    """
    tp, itemsize = rollout.tensor_model_parallel_size, getattr(torch, rollout.dtype).itemsize
    weight_bytes = parameters * itemsize // tp
    token_bytes = kv_bytes_per_token(hf_config, tp=tp, itemsize=itemsize)
    context = rollout.max_model_len + CONTEXT_MARGIN
    tokens = kv_cache_tokens(
        device_bytes=device_bytes,
        utilization=rollout.gpu_memory_utilization,
        weight_bytes=weight_bytes,
        token_bytes=token_bytes,
        context=context,
    )
    if on_cpu:
        tokens = min(tokens, -(-rollout.max_num_seqs * context // KV_PAGE) * KV_PAGE)
    return Memory(weight_bytes, tokens * token_bytes, tokens)


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
    rollout: RolloutConfig,
    *,
    model_path: str,
    tokenizer_path: str | None,
    trust_remote_code: bool,
    device_index: int | None,
    kv_tokens: int,
    seed: int,
    deterministic: bool,
) -> dict[str, Any]:
    """Arguments of `sglang.Engine`, `rollout.engine_kwargs` included.

    `device_index` None is the CPU. Raises ValueError for engine_kwargs that follow from other keys.
    """
    if refused := sorted(OURS & rollout.engine_kwargs.keys()):
        raise ValueError(f"rollout.engine_kwargs: {', '.join(refused)} is set by the trainer")
    arguments: dict[str, Any] = {
        "model_path": model_path,
        "tokenizer_path": tokenizer_path,
        "trust_remote_code": trust_remote_code,
        # Texts that end a response are found in text: only then does the engine detokenize.
        "skip_tokenizer_init": not rollout.stop,
        "load_format": "dummy",
        "custom_weight_loader": [LOADER],
        "dtype": rollout.dtype,
        "tp_size": rollout.tensor_model_parallel_size,
        "context_length": rollout.max_model_len + CONTEXT_MARGIN,
        "max_running_requests": rollout.max_num_seqs,
        "chunked_prefill_size": rollout.max_num_batched_tokens,
        "max_total_tokens": kv_tokens,
        "random_seed": seed,
        "sleep_on_idle": True,
        "watchdog_timeout": rollout.timeout_s,
        "log_level": "info",
    }
    if device_index is None:
        arguments |= _cpu_arguments()
    else:
        arguments |= _cuda_arguments(rollout, device_index, deterministic)
    return arguments | rollout.engine_kwargs


def _cpu_arguments() -> dict[str, Any]:
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.8,
    }


def _cuda_arguments(rollout: RolloutConfig, index: int, deterministic: bool) -> dict[str, Any]:
    return {
        "device": "cuda",
        "base_gpu_id": index,
        "enable_memory_saver": rollout.free_cache_engine,
        "disable_cuda_graph": rollout.enforce_eager,
        # A share of what is free at the start, not of the card: max_total_tokens decides instead.
        "mem_fraction_static": 0.97,
        "enable_deterministic_inference": deterministic,
    }
