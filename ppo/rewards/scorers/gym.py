"""Scorer of reasoning-gym tasks: the task's own, or the last number. A text in, a number out."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from ppo.rewards.scorers.gsm8k import last_number, true_number


def score(
    text: str,
    ground_truth: object,
    extra_info: Mapping[str, Any],
    *,
    task: str,
    method: str = "own",
) -> float:
    """Score of one answer, 0 to 1.

    Args:
        extra_info: `metadata` of the entry, a mapping or its JSON (own method).
        task: name in reasoning-gym, such as chain_sum.
        method: "own" is the task's scorer, on the text in <answer> tags if there are any, else
            on the whole; "last_number" gives 1 when the last number is the true one.
    """
    if method == "last_number":
        return float(last_number(text) == true_number(ground_truth))
    metadata = extra_info.get("metadata") or {}
    if isinstance(metadata, str):
        metadata = json.loads(metadata)
    entry = {
        "question": extra_info.get("question", ""),
        "answer": ground_truth,
        "metadata": metadata,
    }
    return float(_own_scorer(task)(answer(text), entry))


def answer(text: str) -> str:
    """What stands in <answer> tags, else the whole text."""
    from reasoning_gym.utils import extract_answer

    tagged = extract_answer(text)
    return text.strip() if tagged is None else tagged


@cache
def _own_scorer(task: str) -> Callable[..., float]:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(task)
