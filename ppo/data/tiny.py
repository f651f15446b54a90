"""The copy task `tiny`, and preferences between answers to it: rows made from a seed."""

import random
from collections.abc import Iterator
from typing import Any, Literal

NUM_ROWS = {"train": 1024, "val": 128}
MAX_LETTERS = 24
"""longest text to copy: prompts stay within 32 tokens, answers within 32"""
LETTERS = "abcdefgh"
_OTHERS = [chr(code) for code in (*range(33, 97), *range(105, 127), 0xFFFD)]
"""what else a response may have in it; the last stands for bytes that are no text"""


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


def tiny_pairs(split: Literal["train", "val"], seed: int) -> Iterator[dict[str, Any]]:
    """{prompt, chosen, rejected} for the copy task: a copy is preferred to one that is cut short
    or has other characters in it, of which it may have any."""
    rng = random.Random(f"tiny-pairs-{split}-{seed}")
    for index in range(NUM_ROWS[split]):
        row = _copy_row(rng, split, index)
        text = row["reward_model"]["ground_truth"]
        share = rng.random()
        worse = [_OTHERS[rng.randrange(len(_OTHERS))] if rng.random() < share else c for c in text]
        if rng.random() < 0.3 or "".join(worse) == text:
            worse = worse[: rng.randrange(len(worse))]
        yield {"prompt": row["prompt"], "chosen": text, "rejected": "".join(worse)}
