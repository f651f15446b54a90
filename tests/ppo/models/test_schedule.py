"""Learning-rate factors worked out by hand."""

import pytest

from ppo.models.schedule import lr_factor


def factors(kind, *, warmup_steps: int, total_steps: int, min_lr_ratio: float = 0.0) -> list[float]:
    return [
        lr_factor(
            step,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
            kind=kind,
            min_lr_ratio=min_lr_ratio,
        )
        for step in range(total_steps + 2)
    ]


def test_constant_after_a_warm_up_that_never_starts_at_zero() -> None:
    assert factors("constant", warmup_steps=4, total_steps=6) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    assert factors("constant", warmup_steps=0, total_steps=2, min_lr_ratio=0.5) == [1, 1, 1, 1]


def test_linear_falls_to_the_minimum_and_stays() -> None:
    expected = [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert factors("linear", warmup_steps=2, total_steps=6, min_lr_ratio=0.2) == pytest.approx(
        expected
    )


def test_cosine_falls_to_the_minimum_and_stays() -> None:
    root = 2**-0.5
    expected = [1.0, (1 + root) / 2, 0.5, (1 - root) / 2, 0.0, 0.0]
    assert factors("cosine", warmup_steps=0, total_steps=4) == pytest.approx(expected)


def test_a_run_that_is_all_warm_up_divides_by_nothing() -> None:
    assert factors("linear", warmup_steps=2, total_steps=2) == [0.5, 1.0, 1.0, 0.0]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="cosine"):
        lr_factor(0, warmup_steps=0, total_steps=1, kind="step", min_lr_ratio=0.0)  # pyright: ignore
