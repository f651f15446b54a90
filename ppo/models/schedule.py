"""Course of the learning rate, a pure function of the step."""

import math
from typing import Literal


def lr_factor(
    step: int,
    *,
    warmup_steps: int,
    total_steps: int,
    kind: Literal["constant", "cosine", "linear"],
    min_lr_ratio: float,
) -> float:
    """What the peak learning rate is multiplied with at a step.

    Warm-up rises linearly from 1 / warmup_steps at step 0 to 1 at step warmup_steps - 1, so that
    no step is wasted at 0. Then, with p running from 0 at step warmup_steps to 1 at total_steps:
    constant 1; linear 1 - p; cosine (1 + cos(pi p)) / 2 (arXiv 1608.03983, eq. 5), the last two
    rescaled to end at min_lr_ratio, where they stay.

    Args:
        step: 0 for the first.
        warmup_steps: 0 means none.
        total_steps: steps of the whole run, warm-up included.
        kind: course after the warm-up.
        min_lr_ratio: 0 to 1; constant ignores it.

    Raises:
        ValueError: unknown kind.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    match kind:
        case "constant":
            return 1.0
        case "linear":
            left = 1.0 - progress
        case "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            raise ValueError(f"lr_scheduler_type {kind!r}: must be constant, linear or cosine")
    return min_lr_ratio + (1.0 - min_lr_ratio) * left
