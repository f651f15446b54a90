"""AdamW on the host does what torch's does on the device, wherever gradients arrive."""

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from sharding.adamw import EIGHT_BITS, HostAdamW, NarrowAdamW, host
from sharding.fsdp import gradient_norm
from tests.fake_device import fake_device
from tests.sharding.models import tiny_llama, token_loss, tokens_of

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
MOST = 2.0
"""norm, which is exceeded"""


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Three micro-batches a step, gradients clipped; norms before."""
    norms = []
    for step in range(steps):
        if isinstance(optimizer, HostAdamW):
            optimizer.fetch()
        for number in range(3):
            token_loss(model, tokens_of(3 * step + number)).backward()
        if isinstance(optimizer, HostAdamW):
            assert all(p.grad is None for p in model.parameters())
            norm = gradient_norm(model, CPU, optimizer.gradients())
            optimizer.scale(MOST, norm)
        else:
            norm = gradient_norm(model, CPU)
            nn.utils.clip_grads_with_norm_(model.parameters(), MOST, norm)
        norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("device", [nullcontext, fake_device])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, EIGHT_BITS])
def test_a_step_on_the_host_is_bitwise_the_step_on_the_device(device, dtype) -> None:
    plain = tiny_llama()
    theirs: torch.optim.AdamW = NarrowAdamW(plain.parameters(), state_dtype=dtype, **OPTIONS)
    if dtype == torch.float32:
        theirs = torch.optim.AdamW(plain.parameters(), **OPTIONS)
    expected = _train(plain, theirs, 2)
    with device():
        model = tiny_llama()
        mine = HostAdamW(model, state_dtype=dtype, **OPTIONS)
        assert _train(model, mine, 2) == expected
    assert expected[0] > MOST
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
        assert mine.state[p].keys() == theirs.state[q].keys()
        assert all(torch.equal(mine.state[p][n], x) for n, x in theirs.state[q].items())


def test_an_update_that_is_left_out_leaves_nothing_behind() -> None:
    model, plain = tiny_llama(), tiny_llama()
    mine = HostAdamW(model, state_dtype=torch.float32, **OPTIONS)
    token_loss(model, tokens_of(5)).backward()
    mine.zero_grad()
    assert mine.gradients() == []
    _train(model, mine, 1)
    _train(plain, torch.optim.AdamW(plain.parameters(), **OPTIONS), 1)
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )


def test_gradients_on_their_way_hold_no_more_than_so_many_bytes(monkeypatch) -> None:
    model, held = tiny_llama(), []
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    monkeypatch.setattr(host, "PENDING_BYTES", largest)
    arrive = host._arrive

    def slowly(copied: Any, sent: torch.Tensor, target: torch.Tensor) -> None:
        held.append(mine._pending_bytes)
        time.sleep(0.002)
        arrive(copied, sent, target)

    monkeypatch.setattr(host, "_arrive", slowly)
    mine = HostAdamW(model, state_dtype=torch.float32, **OPTIONS)
    for number in range(2):  # the first gradients are where they stay
        token_loss(model, tokens_of(number)).backward()
        assert mine._pending_bytes <= largest
    assert mine.gradients() and mine._pending_bytes == 0
    assert 0 < max(held) <= 2 * largest  # with the one that is just sent


@pytest.mark.gpu
def test_gradients_leave_a_gpu_and_parameters_come_back() -> None:
    cuda = torch.device("cuda", 0)
    plain, model = tiny_llama(device=cuda), tiny_llama(device=cuda)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True, **OPTIONS)
    mine = HostAdamW(model, state_dtype=torch.float32, fused=True, **OPTIONS)
    for step in range(3):
        mine.fetch()
        for number in range(2):
            tokens = tokens_of(step + number).to(cuda)
            for each in (plain, model):
                token_loss(each, tokens).backward()
        norm = gradient_norm(plain, cuda)
        torch.testing.assert_close(gradient_norm(model, cuda, mine.gradients()), norm)
        nn.utils.clip_grads_with_norm_(plain.parameters(), MOST, norm)
        mine.scale(MOST, norm)
        for each in (theirs, mine):
            each.step()
            each.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)
        assert not mine.state[p]["exp_avg"].is_cuda
