"""Layers that carry a state, over packed rows, against transformers one document at a time."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from ppo.logprobs import LogitTransform
from ppo.models.forward import ForwardPlan, label_logprobs, pack
from ppo.models.packed.attention import make_documents
from ppo.models.packed.kernels import sdpa_kernel
from ppo.models.small_copy import build_small_copy
from sharding.activations import checkpoint_activations
from tests.ppo.models.families import EXTRA
from tests.ppo.models.hf_models import packed_inputs, plain_scores

CPU = torch.device("cpu")
LENGTHS = [5, 9, 1, 5, 12]  # two of one length, one shorter than a convolution


def gradients(module: torch.nn.Module, logprobs: Tensor) -> dict[str, Tensor]:
    logprobs.square().sum().backward()
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        pytest.param("qwen3_5_text", {}, marks=pytest.mark.full),  # linear attention
        pytest.param(
            "falcon_h1",  # both in one layer
            EXTRA["falcon_h1"] | {"num_hidden_layers": 2},
            marks=pytest.mark.full,
        ),
        ("lfm2", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}),
        ("minimax", {"num_hidden_layers": 2}),  # no convolution to know it by
        ("recurrent_gemma", {}),
    ],
)
def test_a_packed_row_has_the_scores_and_gradients_of_its_documents_alone(family, extra):
    config = AutoConfig.for_model(family, **extra)
    g = torch.Generator().manual_seed(3)
    documents = [torch.randint(3, 96, (n,), generator=g) for n in LENGTHS]
    plain, packed = (build_small_copy(config).requires_grad_() for _ in range(2))
    plain.set_attn_implementation("eager")
    want, _ = plain_scores(plain, documents, 1.0)

    pack(packed)
    checkpoint_activations(packed)  # layers run again in the backward pass are told of documents
    inputs: dict[str, Any] = dict(packed_inputs(documents))
    bounds = inputs.pop("cu_seqlens")
    scale = getattr(config, "lm_head_multiplier", 1.0)
    cap = getattr(config, "logits_soft_cap", None)
    plan = ForwardPlan(LogitTransform(scale, cap), kernel=None, sp_group=None, device=CPU)
    attention = {"documents": make_documents(bounds, CPU, sdpa_kernel)}
    got = label_logprobs(packed, plan, attention=attention, **inputs).logprobs
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    found, expected = gradients(packed, got), gradients(plain, want)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (found[name] - grad).norm() <= 5e-3 * grad.norm() + 1e-6, name
