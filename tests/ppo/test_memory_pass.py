"""The predicted memory of a training pass against the peak of live tensors of a real one."""

from pathlib import Path

import pytest
import torch

from ppo.config import FsdpConfig, ModelConfig
from ppo.config.training import MixedPrecisionConfig
from ppo.memory_pass import Pass, ShardedModel, total, training_pass
from ppo.model_shapes import find_shape
from tests.distributed import run_distributed

TOKENS = 1024
CASES = [
    # sp, param_dtype, gradient checkpointing, model
    (1, "float32", True, "actor"),
    (1, "float32", False, "actor"),
    (1, "bfloat16", True, "actor"),
    (2, "float32", True, "actor"),
    (2, "bfloat16", False, "critic"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    path = tmp_path_factory.mktemp("model")
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def measured_and_predicted(rank: int, world_size: int, folder: Path) -> list[tuple[float, float]]:
    return [_case(world_size, folder, *case) for case in CASES]


def _case(
    world_size: int, folder: Path, sp: int, dtype: str, checkpointing: bool, kind: str
) -> tuple[float, float]:
    """Bytes of the second step, two micro-batches of TOKENS tokens a rank."""
    from ppo.models import build_causal_lm, build_value_model
    from sharding.dims import ParallelDims
    from sharding.memory import PeakTracker
    from sharding.mesh import build_mesh

    cpu = torch.device("cpu")
    dims = ParallelDims(world_size=world_size, ranks_per_node=world_size, sp=sp)
    mesh = build_mesh(dims, cpu)
    fsdp = FsdpConfig(mixed_precision=MixedPrecisionConfig(param_dtype=dtype))  # type: ignore[arg-type]
    module = (build_value_model if kind == "critic" else build_causal_lm)(
        folder,
        mesh,
        model_config=ModelConfig(path=str(folder)),
        fsdp_config=fsdp,
        checkpointing=checkpointing,
        forward_only=False,
        dtype=torch.float32,
    )
    optimizer = torch.optim.AdamW(module.parameters())
    inputs = {
        "input_ids": torch.randint(0, 4096, (1, TOKENS)),
        "position_ids": torch.arange(TOKENS)[None] + TOKENS * mesh.sp_rank,
        "cu_seqlens": torch.tensor([0, TOKENS * sp]),
        "positions": torch.arange(TOKENS),
    }
    if kind != "critic":
        inputs |= {"labels": torch.randint(0, 4096, (TOKENS,)), "temperature": 1.0}
    for _ in range(2):
        with PeakTracker(cpu) as tracker:
            tracker.watch(module.parameters())
            tracker.watch(x for state in optimizer.state.values() for x in state.values())
            for _ in range(2):
                output = module(**inputs)
                (output if kind == "critic" else output.logprobs).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    found = find_shape(str(folder))
    assert found is not None
    model = ShardedModel(name=kind, shape=found[0], fsdp=fsdp, shard_size=dims.shard_size, master=4)
    run = Pass(tokens=TOKENS, sp=sp, checkpointing=checkpointing, accumulates=True, cuda=False)
    static = model.shard_params * 3 * 4  # parameters and Adam's moments
    return tracker.peak_bytes, static + total(training_pass(model, run))


@pytest.mark.distributed
def test_the_prediction_is_within_a_tenth_below_and_a_quarter_above_the_measured_peak(folder):
    for results in run_distributed(measured_and_predicted, 2, folder):
        for case, (measured, predicted) in zip(CASES, results, strict=True):
            assert 0.9 < predicted / measured < 1.25, (case, measured, predicted)
