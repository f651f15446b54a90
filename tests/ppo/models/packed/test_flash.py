"""Which kernels of attention are used: only what computes the same, on every rank."""

from typing import Any

import pytest
import torch

from ppo.models.packed.flash import SPARE, Heads, choose, error_of, use_fastest_flash, wrong
from ppo.models.packed.kernels import sdpa_kernel
from sharding.groups import world
from sharding.mesh import init_distributed

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 64, None)


def test_rounding_is_no_error_and_a_wrong_gradient_or_window_is():
    exact = error_of(sdpa_kernel, HEADS, CPU)
    assert 1e-3 < exact < 1e-2  # bfloat16 has 8 bits

    def scaled(q: Any, k: Any, v: Any, documents: Any, **options: Any) -> Any:
        output = sdpa_kernel(q, k, v, documents, **options)
        return output + (v * 0.05 - (v * 0.05).detach()).repeat_interleave(2, 1)  # gradient alone

    def blind(q: Any, k: Any, v: Any, documents: Any, **options: Any) -> Any:
        options["window"] = None
        return sdpa_kernel(q, k, v, documents, **options)

    assert error_of(scaled, HEADS, CPU) > SPARE * exact
    assert error_of(blind, HEADS, CPU) == exact
    assert error_of(blind, HEADS._replace(window=4), CPU) > 0.1

    def drained(q: Any, k: Any, v: Any, documents: Any, **options: Any) -> Any:
        options["sinks"] = None
        return sdpa_kernel(q, k, v, documents, **options)

    assert error_of(sdpa_kernel, HEADS._replace(sinks=True), CPU) < 1e-2
    assert error_of(drained, HEADS._replace(sinks=True), CPU) > 0.1


def test_what_is_not_a_number_is_wrong_and_so_is_more_than_the_limit():
    assert wrong([0.004, 0.005], [0.006, 0.006]) is None
    assert "off by nan" in str(wrong([0.004, float("nan")], [0.006, 0.006]))
    assert "off by 0.01, flash attention 2 by 0.004" in str(wrong([0.01], [0.006]))


@pytest.mark.parametrize(
    ("problems", "chosen"),
    [
        ({"FA3": None, "FA4": None}, "FA3"),
        ({"FA3": "ModuleNotFoundError: no such module\nmore", "FA4": None}, "FA4"),
        ({"FA3": "not installed", "FA4": "its results are off by 1"}, None),
    ],
)
def test_the_first_without_a_problem_is_used_and_others_are_undone(problems, chosen):
    active: list[str] = []

    def problem(name: str) -> str | None:
        active.append(name)
        return problems[name]

    with init_distributed(CPU):
        assert choose(("FA3", "FA4"), problem, active.clear, world()) == chosen
    assert active == ([] if chosen is None else [chosen])


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_what_is_active_on_a_gpu_is_as_exact_as_flash_attention_2():
    from ppo.models.packed.kernels import varlen_kernel

    device, heads = torch.device("cuda", 0), Heads(8, 2, 128, 64)
    before = error_of(varlen_kernel, heads, device)
    with init_distributed(device):
        use_fastest_flash(heads, device, world())
    assert error_of(varlen_kernel, heads, device) <= SPARE * before
