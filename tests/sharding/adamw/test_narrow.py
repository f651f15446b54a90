"""Adam's moments in few bits: against float64 recursions, torch's AdamW, and a small task."""

import pytest
import torch
from torch import Tensor, nn

from sharding.adamw import EIGHT_BITS, NarrowAdamW, round_to_bfloat16
from sharding.adamw import narrow as module
from sharding.adamw.eight_bits import decode

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def parameters_of(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((7, 5), (11,), (0, 5), (1,))
    return [nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in shapes]


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype) * 0.1


@pytest.mark.parametrize(
    ("at_once", "fused"),  # 5: parameters in pieces, which the fused kernel rounds otherwise
    [(2**26, False), (12, False), (5, False), (2**26, True)],
)
def test_moments_in_float32_give_what_torchs_adamw_gives_bitwise(
    monkeypatch, at_once, fused
) -> None:
    monkeypatch.setattr(module, "ELEMENTS_AT_ONCE", at_once)
    mine, theirs = parameters_of(), parameters_of()
    narrow = NarrowAdamW(mine, state_dtype=torch.float32, fused=fused, **OPTIONS)
    wide = torch.optim.AdamW(theirs, fused=fused, **OPTIONS)
    for step in range(4):
        for parameters in (mine, theirs):
            give_gradients(parameters, step)
        mine[1].grad = theirs[1].grad = None if step == 2 else mine[1].grad
        narrow.step()
        wide.step()
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(narrow.state[a][name], wide.state[b][name])


@pytest.mark.gpu
def test_a_gpu_rounds_as_the_cpu_does() -> None:
    found = []
    for device in ("cpu", "cuda"):
        parameters = parameters_of(device=device)
        optimizer = NarrowAdamW(parameters, state_dtype=torch.bfloat16, fused=True, **OPTIONS)
        for step in range(5):
            give_gradients(parameters, step)
            optimizer.step()
        found.append([p.detach().cpu() for p in parameters])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_half_parameters_may_have_whole_moments() -> None:
    mine, theirs = parameters_of(torch.bfloat16), parameters_of(torch.bfloat16)
    exact = [nn.Parameter(p.detach().float()) for p in theirs]
    narrow = NarrowAdamW(mine, state_dtype=torch.float32, **OPTIONS)
    wide = torch.optim.AdamW(exact, **OPTIONS)
    for step in range(3):
        give_gradients(mine, step)
        for p, q in zip(exact, mine, strict=True):
            assert q.grad is not None
            p.grad = q.grad.float()
            p.data.copy_(q.detach())
        narrow.step()
        wide.step()
    for a, b in zip(mine, exact, strict=True):
        assert a.dtype == torch.bfloat16 and torch.equal(a, b.bfloat16())
        assert torch.equal(narrow.state[a]["exp_avg_sq"], wide.state[b]["exp_avg_sq"])


def test_a_number_is_rounded_up_as_often_as_it_is_nearer_to_the_upper_one() -> None:
    shares = torch.linspace(0.0, 0.98, 50, dtype=torch.float64)
    base, place = 1.5, 2.0**-7  # of the last bit of bfloat16 between 1 and 2
    numbers = torch.cat([base + shares * place, -(base + shares * place)]).float()
    total = torch.zeros(100, dtype=torch.float64)
    for step in range(1, 513):
        rounded = numbers.clone()
        round_to_bfloat16(rounded, torch.tensor(float(step)))
        assert torch.equal(rounded, rounded.bfloat16().float())
        total += rounded.double()
    error = (total / 512 - numbers.double()).abs() / place
    assert error.max() < 0.01  # to the nearest it is up to 0.5


def averages_of(squares: list[float], state_dtype: torch.dtype) -> list[float]:
    """Adam's v after each of these squared gradients."""
    p = nn.Parameter(torch.zeros(1, 2))
    optimizer = NarrowAdamW([p], state_dtype=state_dtype, **OPTIONS)
    found = []
    for square in squares:  # beside one that is larger, and so the scale of a block
        p.grad = torch.tensor([[square**0.5, 30.0]])
        optimizer.step()
        state = optimizer.state[p]
        v = state["exp_avg_sq"]
        if state_dtype == EIGHT_BITS:
            v = decode(v, state["exp_avg_sq_scale"], signed=False)
        found.append(v[0, 0].item())
    return found


def test_the_average_of_squares_goes_on_moving_where_rounding_to_the_nearest_stands_still() -> None:
    squares = [1.0] * 600 + [1e-4] * 900 + [0.3] * 600
    v = nearest = 0.0
    exact, still = [], []
    for square in squares:
        v = 0.999 * v + 0.001 * square
        exact.append(v)
        nearest = torch.tensor(0.999 * nearest + 0.001 * square).bfloat16().item()
        still.append(nearest)
    for dtype, most in ((torch.bfloat16, 0.03), (EIGHT_BITS, 0.25)):
        found = averages_of(squares, dtype)
        worst = max(abs(a / b - 1) for a, b in zip(found[20:], exact[20:], strict=True))
        assert worst < most, dtype  # of v; the update has its root
    assert max(abs(a / b - 1) for a, b in zip(still[20:], exact[20:], strict=True)) > 0.3


def distance(state_dtype: torch.dtype) -> float:
    """From the solution of a noisy regression whose inputs differ in scale by a thousand."""
    generator = torch.Generator().manual_seed(3)
    scales = torch.logspace(-1.5, 1.5, 16)
    truth, p = torch.randn(1, 16, generator=generator), nn.Parameter(torch.zeros(1, 16))
    options = {**OPTIONS, "lr": 3e-2, "weight_decay": 0.0}
    optimizer = NarrowAdamW([p], state_dtype=state_dtype, **options)
    total = torch.zeros(1, 16)
    for step in range(1500):
        optimizer.param_groups[0]["lr"] = 3e-2 * (1 - step / 1500)
        x = torch.randn(32, 16, generator=generator) * scales
        noise = torch.randn(32, generator=generator)
        p.grad = (((p.detach() - truth) @ x.t() / scales.max() + 0.1 * noise) @ x) / 32
        optimizer.step()
        total = p.detach()
    return relative(total, truth)


def relative(found: Tensor, truth: Tensor) -> float:
    return ((found - truth).norm() / truth.norm()).item()


def test_a_small_task_is_learned_as_well_as_with_moments_in_float32() -> None:
    whole, half, codes = map(distance, (torch.float32, torch.bfloat16, EIGHT_BITS))
    assert whole < 0.2 and half < 1.1 * whole and codes < 1.2 * whole, (whole, half, codes)
