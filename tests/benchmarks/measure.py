"""What the benchmarks of updates share: a model in SmolLM2's shape, time, peak."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig

from ppo.config import FsdpConfig, ModelConfig
from ppo.models.build import build_causal_lm
from sharding.mesh import Mesh
from tests.peak_memory import PeakTracker


def save_smollm2_shape(folder: Path, *, layers: int = 30) -> Path:
    """An HF folder of random bfloat16 weights in the shape of SmolLM2-135M."""
    from transformers import LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def build_smollm2_shape(mesh: Mesh) -> nn.Module:
    """That model, sharded: float32 masters, bfloat16 computation, gradient checkpointing."""
    with tempfile.TemporaryDirectory() as folder:
        return build_for_update(save_smollm2_shape(Path(folder)), mesh)


def build_for_update(folder: Path, mesh: Mesh, fsdp_config: FsdpConfig | None = None) -> nn.Module:
    """A causal LM with float32 masters and gradient checkpointing."""
    return build_causal_lm(
        folder,
        mesh,
        model_config=ModelConfig(path=str(folder), tokenizer_path=str(folder)),
        fsdp_config=fsdp_config or FsdpConfig(),
        checkpointing=True,
        forward_only=False,
        dtype=torch.float32,
    )


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call: of this process's core on a CPU (others may use it too), else wall."""
    if device.type == "cpu":
        start = time.process_time()
        work()
        return time.process_time() - start
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def fastest(
    works: dict[str, Callable[[], Any]], device: torch.device, repeats: int
) -> dict[str, float]:
    """Fewest seconds of each piece of work, in turns; run each once before (peak_mib does)."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(seconds(work, device))
    return {name: min(taken) for name, taken in times.items()}


def peak_mib(work: Callable[[], Any], device: torch.device) -> float:
    """Peak of live tensors that one call makes, MiB."""
    with PeakTracker(device) as tracker:
        work()
    return tracker.extra_bytes / 2**20
