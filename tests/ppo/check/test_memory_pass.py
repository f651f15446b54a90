"""The predicted memory of a training pass against the peak of live tensors of a real one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ppo.check.memory_pass import ITEM_BYTES, LOGITS_BLOCK, Pass, ShardedModel, total, training_pass
from ppo.config import FsdpConfig, Lora, MixedPrecisionConfig, ModelConfig
from ppo.logprobs.blocks import CPU_BLOCK_ELEMENTS, DEVICE_BLOCK_ELEMENTS
from ppo.model_shapes import find_shape
from tests.distributed import run_distributed

TOKENS = 1024
CPU = torch.device("cpu")
LORA = Lora("model", 16, 16.0, ["all-linear"], [], 0.0, seed=0)
CASES: list[tuple[Any, ...]] = [
    # sp, param_dtype, gradient checkpointing, model
    (1, "float32", True, "actor"),
    (1, "float32", False, "actor"),
    (1, "bfloat16", True, "actor"),
    (2, "float32", True, "actor"),
    (2, "bfloat16", False, "critic"),
    (1, "float32", True, "actor", LORA),
    (1, "bfloat16", False, "actor", LORA),
    (2, "bfloat16", True, "critic", LORA),
]


def test_the_plan_knows_the_largest_block_of_logits() -> None:
    """It imports no torch, so it has the numbers of its own."""
    assert LOGITS_BLOCK == {True: DEVICE_BLOCK_ELEMENTS, False: CPU_BLOCK_ELEMENTS}


def _save(path: Path, **sizes: int) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config: Any = Qwen2Config(tie_word_embeddings=True, **sizes)  # type: ignore[arg-type]
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return _save(
        tmp_path_factory.mktemp("model"),
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
    )


def measured_and_predicted(rank: int, world_size: int, folder: Path) -> list[tuple[float, float]]:
    return [_case(world_size, folder, *case) for case in CASES]


def _case(
    world_size: int,
    folder: Path,
    sp: int,
    dtype: str,
    checkpointing: bool,
    kind: str,
    lora: Lora | None = None,
    *,
    device: torch.device = CPU,
    tokens: int = TOKENS,
) -> tuple[float, float]:
    """Bytes of the second step, two micro-batches of `tokens` tokens a rank."""
    from ppo.models.build import build_causal_lm, build_value_model
    from sharding.dims import ParallelDims
    from sharding.mesh import build_mesh
    from tests.peak_memory import PeakTracker

    dims = ParallelDims(world_size=world_size, ranks_per_node=world_size, sp=sp)
    mesh = build_mesh(dims, device)
    fsdp = FsdpConfig(mixed_precision=MixedPrecisionConfig(param_dtype=dtype))  # type: ignore[arg-type]
    module = (build_value_model if kind == "critic" else build_causal_lm)(
        folder,
        mesh,
        model_config=ModelConfig(path=str(folder)),
        fsdp_config=fsdp,
        checkpointing=checkpointing,
        forward_only=False,
        dtype=torch.float32 if lora is None else getattr(torch, dtype),
        lora=lora,
    )
    optimizer = torch.optim.AdamW(p for p in module.parameters() if p.requires_grad)
    inputs: dict[str, Any] = {
        "input_ids": torch.randint(0, 4096, (1, tokens)),
        "position_ids": torch.arange(tokens)[None] + tokens * mesh.sp_rank,
        "cu_seqlens": torch.tensor([0, tokens * sp]),
        "positions": torch.arange(tokens),
    }
    if kind != "critic":
        inputs |= {"labels": torch.randint(0, 4096, (tokens,)), "temperature": 1.0}
    on_device = inputs.keys() - {"cu_seqlens", "temperature"}
    inputs |= {name: inputs[name].to(device) for name in on_device}
    for _ in range(2):
        with PeakTracker(device) as tracker:
            tracker.watch(module.parameters())
            tracker.watch(x for state in optimizer.state.values() for x in state.values())
            for _ in range(2):
                output = module(**inputs)
                (output if kind == "critic" else output.logprobs).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    states = [x for s in optimizer.state.values() for n, x in s.items() if n != "step"]
    moments = sum(x.to_local().numel() * x.element_size() for x in states)
    found = find_shape(str(folder))
    assert found is not None
    model = ShardedModel(
        name=kind,
        shape=found[0],
        has_logits=kind == "actor",
        fsdp=fsdp,
        shard_size=dims.shard_size,
        master=4 if lora is None else ITEM_BYTES[dtype],
        moment=4,
        lora=None if lora is None else found[0].lora_size(lora.rank, lora.target_modules, []),
    )
    run = Pass(
        tokens=tokens,
        sp=sp,
        checkpointing=checkpointing,
        accumulates=True,
        cuda=device.type == "cuda",
    )
    of_adam = model.trained_params * 2 * model.moment
    assert 0.9 < of_adam / moments < 1.1, (of_adam, moments)
    static = model.stored_bytes + model.trained_params * 2 * model.moment
    return tracker.peak_bytes, static + total(training_pass(model, run))


@pytest.mark.distributed
def test_the_prediction_is_within_a_tenth_below_and_a_quarter_above_the_measured_peak(folder):
    for results in run_distributed(measured_and_predicted, 2, folder):
        for case, (measured, predicted) in zip(CASES, results, strict=True):
            assert 0.9 < predicted / measured < 1.25, (case, measured, predicted)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_an_update_of_smollm2_on_adapters_takes_less_than_half_the_memory(tmp_path):
    from sharding.mesh import init_distributed

    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30}
    folder = _save(tmp_path / "model", **sizes, **heads)
    with init_distributed(CPU):
        whole, _ = _case(1, folder, 1, "float32", True, "actor")
        adapters, predicted = _case(1, folder, 1, "float32", True, "actor", LORA)
    print(f"peak of an update: {adapters / whole:.2f} of the whole model's {whole / 2**20:.0f} MiB")
    assert adapters < 0.45 * whole, (adapters, whole)
    assert 0.9 < predicted / adapters < 1.25, (predicted, adapters)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_the_prediction_holds_for_what_a_gpu_gives_out(tmp_path, checkpointing, kind):
    from sharding.mesh import init_distributed

    # large enough that the workspaces of matrix products do not matter
    sizes = {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 4096}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    folder = _save(tmp_path / "model", num_hidden_layers=4, **sizes, **heads)
    device = torch.device("cuda", 0)
    with init_distributed(device):
        measured, predicted = _case(
            1, folder, 1, "bfloat16", checkpointing, kind, device=device, tokens=8192
        )
    assert 0.8 < predicted / measured < 1.3, (measured, predicted)
