"""Layers that keep less for their backward pass compute the same gradients."""

from typing import cast

import pytest
import torch
from torch import Tensor, nn

from sharding.activations import HostSaver, checkpoint_activations, offload_activations
from sharding.fsdp import transformer_layers
from tests.sharding.models import tiny_llama, token_loss, tokens_of


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
