"""Rows from reasoning-gym tasks: made from a seed, the held-out part truly held out.

Owns the making; writing is prepare.py's. Needs reasoning-gym (`pip install -e .[data]`).
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ppo.data.prepare.sources import PreparedRow, ask, make_row
from ppo.rewards.contract import RewardError
from ppo.rewards.scorers import builtin

INSTRUCTIONS = {
    "own": "Give the final answer between <answer> and </answer>.",
    "last_number": "Reply with only the final answer.",
}
"""how the answer is scored -> what the prompt asks for"""
CHUNK = 512
MAX_DRAWS = 100
"""draws per wanted held-out question before the task counts as too small"""


class TaskError(ValueError):
    """No such task, a wrong option, or too few different questions."""


def gym_rows(
    task: str,
    *,
    train_size: int,
    test_size: int,
    seed: int,
    options: Mapping[str, Any],
    method: str = "own",
    instruction: str | None = None,
    system: str = "",
) -> tuple[list[PreparedRow], list[PreparedRow]]:
    """Training and test rows of one task.

    Test questions are all different and never occur in training. Training questions may repeat:
    a small task has only so many.

    Args:
        options: of the task in reasoning-gym, such as {"min_terms": 2}.
        method: how answers are scored: by the task's own scorer, or by the last number.
        instruction: behind each question; None = the one that fits the method.

    Raises:
        TaskError: see there.
    """
    asked = INSTRUCTIONS[method] if instruction is None else instruction

    def row(entry: dict[str, Any], split: str, index: int) -> PreparedRow:
        source, truth = f"reasoning_gym/{task}", entry["answer"]
        extra = {
            "split": split,
            "index": index,
            "question": entry["question"],
            "metadata": json.dumps(entry["metadata"], default=str),
            "method": method,
        }
        try:
            builtin.check(source, truth, extra)
        except RewardError as error:
            raise TaskError(f"{task} cannot be scored by --method {method}: {error}") from error
        return make_row(
            ask(f"{entry['question']}\n{asked}" if asked else entry["question"], system=system),
            data_source=source,
            ability="reasoning",
            ground_truth=None if truth is None else str(truth),
            extra_info=extra,
        )

    held_out: dict[str, dict[str, Any]] = {}
    limit = MAX_DRAWS * (test_size + train_size)
    for count, entry in enumerate(_entries(task, options, f"{seed}-test")):
        if len(held_out) == test_size:
            break
        if count == limit:
            raise TaskError(f"{task} has only {len(held_out)} different questions so configured")
        held_out.setdefault(entry["question"], entry)
    train: list[dict[str, Any]] = []
    for count, entry in enumerate(_entries(task, options, f"{seed}-train")):
        if len(train) == train_size:
            break
        if count == limit:
            raise TaskError(f"{task} so configured leaves no question for training: all held out")
        if entry["question"] not in held_out:
            train.append(entry)
    return (
        [row(entry, "train", i) for i, entry in enumerate(train)],
        [row(entry, "test", i) for i, entry in enumerate(held_out.values())],
    )


def _entries(task: str, options: Mapping[str, Any], stream: str) -> Iterator[dict[str, Any]]:
    """Entries of the task without end, different streams for different names."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise TaskError("reasoning-gym is not installed: pip install -e .[data]") from error
    from random import Random

    seeds = Random(stream)
    while True:
        try:
            yield from reasoning_gym.create_dataset(
                task, seed=seeds.getrandbits(31), size=CHUNK, **options
            )
        except (TypeError, ValueError, AssertionError) as error:
            raise TaskError(f"{task} with {dict(options)}: {error}") from error
