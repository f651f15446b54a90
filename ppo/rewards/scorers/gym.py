"""Scorers of reasoning-gym tasks: the task's own. A text in, a number and its answer out."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any


def judge(
    text: str, ground_truth: object, extra_info: Mapping[str, Any], *, task: str
) -> tuple[float, str]:
    """Score of a response by the task's own scorer, 0 to 1, and the answer that it is of.

    Args:
        extra_info: `metadata` of the entry, a mapping or its JSON.
        task: name in reasoning-gym, such as chain_sum.
    """
    metadata = extra_info.get("metadata") or {}
    if isinstance(metadata, str):
        metadata = json.loads(metadata)
    entry = {
        "question": extra_info.get("question", ""),
        "answer": ground_truth,
        "metadata": metadata,
    }
    answer = _answer(text)
    return float(_own_scorer(task)(answer, entry)), answer


def _answer(text: str) -> str:
    """What stands in <answer> tags, else the whole text."""
    from reasoning_gym.utils import extract_answer

    before, closed, _ = text.rpartition("</answer>")  # tags behind it would cost the square of them
    tagged = extract_answer(before + closed)
    return text.strip() if tagged is None else tagged


@cache
def _own_scorer(task: str) -> Callable[..., float]:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(task)
