"""Layers that keep less for their backward pass compute the same gradients."""

from collections import Counter
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sharding.activations import (
    HostSaver,
    block_mlps,
    checkpoint_activations,
    offload_activations,
)
from sharding.adapters import add_adapters
from sharding.fsdp import transformer_layers
from tests.peak_memory import PeakTracker
from tests.sharding.models import VOCAB, tiny_llama, token_loss, tokens_of


def test_checkpointing_keeps_the_gradients_and_runs_every_layer_twice():
    tokens, calls = tokens_of(2), []
    plain, model = tiny_llama(), tiny_llama()
    for layer in transformer_layers(model):
        layer.get_submodule("input_layernorm").register_forward_hook(lambda *_: calls.append(1))
    checkpoint_activations(model)
    token_loss(plain, tokens).backward()
    token_loss(model, tokens).backward()
    assert len(calls) == 6
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(cast(Tensor, p.grad), cast(Tensor, q.grad))


class Operations(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.number: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.number[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def _measured(
    policy: str, rows: int = 0, *, lora: bool = False
) -> tuple[list[Tensor], Counter[str], int]:
    """Gradients of 256 tokens, operations of the pass, peak of live bytes."""
    model = tiny_llama()
    if lora:
        names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and "lm" not in n]
        adapters = add_adapters(model, names, rank=2, scale=0.5, description={})
        adapters.in_place = policy != "selective"
        for name, p in model.named_parameters():
            nn.init.normal_(p, std=0.1) if name.endswith(("lora_A", "lora_B")) else None
    if rows:
        block_mlps(model, rows)
    if policy != "none":
        checkpoint_activations(model, selective=policy == "selective")
    tokens = torch.randint(0, VOCAB, (1, 256))
    with Operations() as operations, PeakTracker(torch.device("cpu")) as tracker:
        token_loss(model, tokens).backward()
    gradients = [cast(Tensor, p.grad) for p in model.parameters()]
    return gradients, operations.number, tracker.peak_bytes


def test_what_is_kept_decides_what_runs_again_and_never_the_gradients():
    plain, once, most = _measured("none")
    full, twice, least = _measured("full")
    selective, again, between = _measured("selective")
    for mine in (full, selective):
        assert all(torch.equal(p, q) for p, q in zip(plain, mine, strict=True))
    attention = next(n for n in once if "attention" in n and "backward" not in n)
    assert (once["mm"], again["mm"]) == (66, 66)
    assert twice["mm"] == 66 + 3 * 6  # but for the last product of each layer
    assert (once[attention], again[attention], twice[attention]) == (3, 3, 6)
    assert (once["silu"], again["silu"]) == (3, 6)
    assert least < 0.5 * most and least < between < 0.8 * most


def test_an_mlp_in_blocks_of_rows_computes_the_same_and_keeps_none_of_its_inside():
    for policy in ("none", "full", "selective"):
        plain, _, most = _measured(policy)
        blocks, _, less = _measured(policy, rows=60)  # the last one has 16
        for p, q in zip(plain, blocks, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6 * float(p.abs().max()))
        assert less < 0.8 * most, policy


def test_adapters_train_on_what_is_kept_beside_them():
    plain, once, _ = _measured("none", lora=True)
    selective, again, _ = _measured("selective", lora=True)
    assert all(torch.equal(p, q) for p, q in zip(plain, selective, strict=True))
    assert again["mm"] - once["mm"] <= 3 * 7  # B x of each adapter: less work than memory


def test_a_layer_that_draws_draws_the_same_again_and_others_leave_the_generators_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    state = torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: asked.append(1) or state())
    found = []
    for recomputes in (False, True):
        model = tiny_llama()
        add_adapters(model, ["model.layers.1.mlp.up_proj"], rank=2, scale=0.5, dropout=0.5,
                     description={})  # fmt: skip
        for name, p in model.named_parameters():
            nn.init.normal_(p, std=0.1) if name.endswith(("lora_A", "lora_B")) else None
        if recomputes:
            block_mlps(model, 5, draws=True)
            checkpoint_activations(model, draws=True)
        torch.manual_seed(7)
        token_loss(model, tokens_of(0)).backward()
        found.append([cast(Tensor, p.grad) for p in model.parameters()])
    assert asked and all(torch.equal(p, q) for p, q in zip(*found, strict=True))
    asked.clear()
    model = tiny_llama()
    block_mlps(model, 2)
    checkpoint_activations(model, selective=True)
    token_loss(model, tokens_of(1)).backward()
    assert not asked


def test_a_layer_without_an_mlp_cannot_run_it_in_blocks():
    model = tiny_llama()
    layer: Any = model.model.layers[1]
    layer.something, layer.mlp = layer.mlp, None
    del layer._modules["mlp"]
    with pytest.raises(ValueError, match=r"has no mlp or .*, but self_attn"):
        block_mlps(model, 8)


def test_tensors_of_the_host_are_not_copied():
    saver = HostSaver(nn.Linear(2, 2), min_bytes=0)
    tensor = torch.ones(4)
    assert saver.pack(tensor) is tensor
    assert saver.unpack(tensor) is tensor


@pytest.mark.gpu
def test_offloaded_activations_give_the_same_gradients_on_a_device():
    tokens = tokens_of(3).cuda()
    with torch.device("cuda"):
        plain, model = tiny_llama(), tiny_llama()
    offload_activations(model, min_bytes=0)
    token_loss(plain, tokens).backward()
    token_loss(model, tokens).backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
