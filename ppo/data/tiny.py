"""The copy task `tiny`: rows made from a seed."""

import random
from typing import Any, Literal

NUM_ROWS = {"train": 1024, "val": 128}
MAX_LETTERS = 24
"""longest text to copy: prompts stay within 32 tokens, answers within 32"""
LETTERS = "abcdefgh"


def tiny_rows(split: Literal["train", "val"], seed: int) -> list[dict[str, Any]]:
    """Rows of the copy task in verl's format; the same for the same seed, on any machine."""
    rng = random.Random(f"tiny-{split}-{seed}")
    return [_copy_row(rng, split, index) for index in range(NUM_ROWS[split])]


def _copy_row(rng: random.Random, split: str, index: int) -> dict[str, Any]:
    text = "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, MAX_LETTERS)))
    return {
        "data_source": "tiny",
        "prompt": [{"role": "user", "content": f"copy {text}"}],
        "ability": "copy",
        "reward_model": {"style": "rule", "ground_truth": text},
        "extra_info": {"split": split, "index": index},
    }
