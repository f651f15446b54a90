"""Layers that torch compiles, against the same layers as they are."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ppo.config import FsdpConfig, Lora, MixedPrecisionConfig, ModelConfig
from ppo.models.build import build_causal_lm
from sharding.compiled import compile_layers
from sharding.fsdp import without_gradients
from sharding.mesh import ParallelDims, build_mesh, init_distributed
from tests.distributed import run_distributed
from tests.ppo.models.hf_models import packed_inputs, save_model

LORA = Lora("model", 4, 8.0, ["all-linear"], [], 0.0, seed=0)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).relu()


class Layers(nn.Module):
    _no_split_modules = ("Layer",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_what_cannot_be_compiled_runs_as_it_is_with_one_warning(caplog):
    asked = []

    def fails(graph: Any, inputs: Any) -> Any:
        asked.append(graph)
        raise OSError("no C++ compiler here")

    module, x = Layers(), torch.randn(3, 4)
    want = module(x)
    compile_layers(module, backend=fails)
    with caplog.at_level(logging.WARNING, logger="sharding.compiled"):
        assert torch.equal(module(x), want)
        assert torch.equal(module(x), want)
    assert len(asked) == 1 and len(caplog.records) == 1
    assert "no C++ compiler here" in caplog.text


def test_layers_of_one_kind_and_rows_of_any_length_are_compiled_once():
    graphs = []

    def counts(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    module = Layers()
    inputs = [torch.ones(rows, 4, requires_grad=True) for rows in (3, 5, 9)]
    plain = [module(x) for x in inputs]
    compile_layers(module, backend=counts)
    compiled = [module(x) for x in inputs]
    assert all(torch.equal(a, b) for a, b in zip(plain, compiled, strict=True))
    assert len(graphs) == 1


def differences(rank: int, world_size: int, folder: Path) -> list[float]:
    """Largest relative difference of log-probs and gradients, of each way to train."""
    mesh = build_mesh(
        ParallelDims(world_size=world_size, ranks_per_node=world_size), torch.device("cpu")
    )
    found = []
    for checkpointing, lora in ((False, None), (True, None), (True, LORA)):
        models = [
            build_causal_lm(
                folder,
                mesh,
                model_config=ModelConfig(
                    path=str(folder),
                    verify_forward=False,
                    compile=value,  # pyright: ignore[reportArgumentType]
                ),
                fsdp_config=FsdpConfig(mixed_precision=MixedPrecisionConfig(param_dtype="float32")),
                checkpointing=checkpointing,
                forward_only=False,
                dtype=torch.float32,
                lora=lora,
            )
            for value in ("false", "layers")
        ]
        found += [apart(models, lengths) for lengths in ([5, 9], [17, 3, 8], [30])]
    return found


def apart(models: list[nn.Module], lengths: list[int]) -> float:
    generator = torch.Generator().manual_seed(sum(lengths))
    inputs = packed_inputs([torch.randint(3, 96, (n,), generator=generator) for n in lengths])
    results: list[list[Tensor]] = []
    for module in models:
        with without_gradients(module):
            before = module(**inputs).logprobs
        logprobs = module(**inputs).logprobs
        logprobs.sum().backward()
        grads: list[Any] = [p.grad for p in module.parameters() if p.grad is not None]
        results.append([before, logprobs.detach(), *(g.full_tensor() for g in grads)])
        module.zero_grad()
    pairs = list(zip(*results, strict=True))
    assert len(pairs) > 4
    return max(((a - b).norm() / b.norm().clamp(min=1e-12)).item() for a, b in pairs)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_compiled_layers_train_as_plain_ones_sharded_recomputed_and_with_adapters(tmp_path):
    """With the real compiler: kernels are made for this CPU, in minutes."""
    folder = save_model(tmp_path, "qwen3", use_sliding_window=False)
    for found in run_distributed(differences, 2, folder, timeout_s=1500):
        assert max(found) < 2e-5, found


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_compiled_layers_train_as_plain_ones_on_a_gpu(tmp_path):
    device = torch.device("cuda", 0)
    module, x = Layers().to(device), torch.randn(64, 4, device=device)
    want = module(x)
    compile_layers(module)
    with init_distributed(device):
        torch.testing.assert_close(module(x), want, rtol=1e-5, atol=1e-5)
