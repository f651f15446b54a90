"""Codes of 8 bits: their error, their mean over steps, and what is never lost."""

import pytest
import torch

from sharding.adamw.eight_bits import decode, encode


@pytest.mark.parametrize(("signed", "most"), [(True, 0.105), (False, 0.123)])
def test_a_code_is_within_one_level_and_codes_what_it_gives_as_it_was(signed, most) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(40, 600, generator=generator) * torch.logspace(-9, 3, 40)[:, None]
    numbers = numbers if signed else numbers.square()
    codes, scales = encode(numbers, torch.tensor(3.0), signed=signed)
    assert codes.shape == (40, 600) and codes.dtype == torch.uint8 and scales.shape == (40, 3)
    found = decode(codes, scales, signed=signed)
    assert torch.equal(scales[:, 2], numbers[:, 512:].abs().amax(-1))
    large = numbers.abs() > numbers.abs().amax(-1, keepdim=True) * 1e-4
    assert ((found / numbers - 1).abs() <= most)[large].all()
    assert (found.sign() * numbers.sign() >= 0).all()
    again, same = encode(found, torch.tensor(8.0), signed=signed)
    assert torch.equal(same, scales)
    assert (again.int() - codes.int()).abs().max() <= 1  # the log of a level may be off by a bit
    assert (again != codes).float().mean() < 0.02


def test_over_steps_a_number_comes_out_as_it_went_in() -> None:
    generator = torch.Generator().manual_seed(1)
    for signed in (True, False):
        numbers = torch.rand(4, 256, generator=generator) ** 2
        numbers = numbers * torch.tensor([1.0, -1.0]).repeat(128) if signed else numbers
        total = torch.zeros(4, 256, dtype=torch.float64)
        for step in range(1, 513):
            total += decode(*encode(numbers, torch.tensor(float(step)), signed=signed),
                            signed=signed)  # fmt: skip
        error = (total / 512 / numbers - 1).abs()
        assert error.median() < 1e-3 and error.quantile(0.99) < 2e-3


def test_a_small_second_moment_is_never_zero_beside_a_large_one() -> None:
    squares = torch.tensor([[1.0, 1e-20, 0.0, 1e-8]])
    codes, scales = encode(squares, torch.tensor(1.0), signed=False)
    found = decode(codes, scales, signed=False)[0]
    assert found[0] == 1 and 0 < found[1] < 1e-12 and 0 < found[2] < 1e-12
    nothing = encode(torch.zeros(2, 300), torch.tensor(1.0), signed=False)
    assert torch.equal(decode(*nothing, signed=False), torch.zeros(2, 300))
