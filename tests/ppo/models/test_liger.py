"""liger's kernels: the model that asked for them has them, and nothing else does."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ppo.config import FsdpConfig, MixedPrecisionConfig, ModelConfig
from ppo.errors import InputError
from ppo.models.build import build_causal_lm
from ppo.models.liger import use_liger
from sharding.mesh import ParallelDims, build_mesh, init_distributed
from tests.ppo.models.hf_models import packed_inputs, save_model

CPU = torch.device("cpu")


def liger_of(monkeypatch: pytest.MonkeyPatch, seen: list[Any]) -> None:
    """A package that changes what the real one does: the model, and its family's file."""
    from transformers.models.qwen2 import modeling_qwen2 as home

    def apply(model: Any, **options: Any) -> None:
        seen.append(options)
        monkeypatch.setattr(home, "Qwen2MLP", object)
        monkeypatch.setattr(home, "apply_rotary_pos_emb", lambda *args: "liger")

    package = SimpleNamespace(_apply_liger_kernel_to_instance=apply)
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)


def test_liger_changes_one_model_and_leaves_its_family_as_it_is_on_a_cpu(monkeypatch):
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.models.qwen2 import modeling_qwen2 as home

    mlp, seen = home.Qwen2MLP, []
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=1, vocab_size=8))
    q, cos = torch.randn(1, 2, 3, 4), torch.ones(1, 3, 4)
    want = home.apply_rotary_pos_emb(q, q, cos, cos)
    liger_of(monkeypatch, seen)
    for _ in range(2):  # actor and reference
        use_liger(model, torch.device("cuda", 0))
    assert home.Qwen2MLP is mlp
    got = home.apply_rotary_pos_emb(q, q, cos, cos)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with FakeTensorMode():
        assert home.apply_rotary_pos_emb(torch.empty(1, device="cuda"), q, cos, cos) == "liger"
    assert seen[0]["rope"] and not seen[0]["fused_linear_cross_entropy"]


def test_liger_is_refused_where_it_cannot_work(monkeypatch):
    with pytest.raises(InputError, match="need CUDA"):
        use_liger(torch.nn.Module(), CPU)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(InputError, match="pip install liger-kernel, or leave it out"):
        use_liger(torch.nn.Module(), torch.device("cuda", 0))


@pytest.mark.gpu
def test_liger_gives_the_log_probs_and_gradients_of_the_plain_model(tmp_path):
    pytest.importorskip("liger_kernel")
    device = torch.device("cuda", 0)
    folder = save_model(tmp_path, "qwen3", use_sliding_window=False)
    inputs = packed_inputs([torch.randint(3, 96, (n,)) for n in (5, 9, 30)])
    inputs = {k: v if k == "cu_seqlens" else v.to(device) for k, v in inputs.items()}
    results: list[list[Any]] = []
    with init_distributed(device):
        mesh = build_mesh(ParallelDims(world_size=1, ranks_per_node=1), device)
        for value in (False, True):
            module = build_causal_lm(
                folder,
                mesh,
                model_config=ModelConfig(path=str(folder), use_liger=value),
                fsdp_config=FsdpConfig(mixed_precision=MixedPrecisionConfig(param_dtype="float32")),
                checkpointing=True,
                forward_only=False,
                dtype=torch.float32,
            )
            logprobs = module(**inputs).logprobs
            logprobs.sum().backward()
            grads: list[Any] = [p.grad for p in module.parameters()]
            results.append([logprobs.detach(), *(grad.full_tensor() for grad in grads)])
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()
