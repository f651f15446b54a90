"""The built-in scorers, picked by data_source. Texts and numbers in, a number out."""

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from ppo.rewards.contract import RewardError
from ppo.rewards.scorers import gsm8k, gym, math_answers, tiny

SOURCES = {
    "gsm8k": ("openai/gsm8k", "gsm8k"),
    "math": (
        "lighteval/MATH",
        "DigitalLearningGmbH/MATH-lighteval",
        "HuggingFaceH4/MATH-500",
        "math_dapo",
        "math",
        "aime",
    ),
    "reasoning_gym": ("reasoning_gym",),
    "exact_match": ("exact_match",),
    "regex": ("regex",),
    "tiny": ("tiny",),
}
"""scorer -> the data sources that it serves; SOURCE/ANYTHING counts as SOURCE"""

METHODS = {
    "gsm8k": ("strict", "flexible"),
    "reasoning_gym": ("own", "last_number"),
    "exact_match": ("exact", "one_of", "last_number"),
}
"""scorer -> its methods, the default first"""


def scorer_of(data_source: str) -> str:
    """Name of the built-in scorer. Raises RewardError when none serves the data source."""
    for scorer, sources in SOURCES.items():
        if any(data_source == name or data_source.startswith(f"{name}/") for name in sources):
            return scorer
    if data_source.startswith("aime"):  # aime24, aime_2025, ...
        return "math"
    known = ", ".join(name for sources in SOURCES.values() for name in sources)
    raise RewardError(
        f"no built-in scorer for data_source {data_source!r} (built in: {known}); "
        "name your own with reward.function.path"
    )


def has_scorer(data_source: str) -> bool:
    """Whether a built-in scorer serves the data source."""
    try:
        scorer_of(data_source)
    except RewardError:
        return False
    return True


def advice(data_source: str) -> str:
    """What to say of the scorer where it gives every response the same score."""
    if not has_scorer(data_source) or scorer_of(data_source) != "exact_match":
        return ""
    return (
        " (exact_match compares the whole response; with extra_info.method = last_number, which "
        "python -m ppo.data.prepare jsonl --method last_number writes, the last number counts)"
    )


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    method: str | None = None,
) -> float:
    """Score of a response, 0 to 1, by the scorer of its data source.

    Args:
        ground_truth: gsm8k and last_number: a number; math: LaTeX; exact_match: text, or a list
            of texts, which is written as JSON for one_of; regex: the pattern; tiny: the text to
            copy.
        method: one of METHODS; None = extra_info["method"] if given, else the default.

    Raises:
        RewardError: as `check`.
    """
    found = score_and_answer(data_source, solution_str, ground_truth, extra_info, method=method)
    return found["score"]


def score_and_answer(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    method: str | None = None,
) -> dict[str, Any]:
    """{"score", "pred"}: the score of `compute_score`, and the answer that it is of, as text.

    Two responses that answer the same have the same text; None where a scorer takes no answer out
    of the response, or finds none.
    """
    scorer, chosen = check(data_source, ground_truth, extra_info, method=method)
    task = data_source.partition("/")[2]
    score, answer = _judge(scorer, chosen, solution_str, ground_truth, task, extra_info or {})
    return {"score": score, "pred": answer}


def _judge(
    scorer: str, method: str, text: str, truth: Any, task: str, extra_info: Mapping[str, Any]
) -> tuple[float, str | None]:
    match scorer:
        case "gsm8k":
            return _same_number(gsm8k.answer(text, method=method), truth)
        case "reasoning_gym" | "exact_match" if method == "last_number":
            return _same_number(gsm8k.last_number(text), truth)
        case "math":
            return math_answers.judge(text, truth)
        case "reasoning_gym":
            return gym.judge(text, truth, extra_info, task=task)
        case "regex":
            return float(re.search(truth, text) is not None), None
        case "tiny":
            return tiny.score(text, truth), text.strip()
    assert scorer == "exact_match", scorer
    truths = json.loads(truth) if method == "one_of" else truth
    truths = truths if isinstance(truths, list) else [truths]
    return float(text.strip() in [str(each).strip() for each in truths]), text.strip()


def _same_number(found: Decimal | None, truth: Any) -> tuple[float, str | None]:
    is_right = found is not None and found == gsm8k.true_number(truth)
    return float(is_right), gsm8k.as_text(found)


def check(
    data_source: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    method: str | None = None,
) -> tuple[str, str]:
    """The scorer of a row and its method. Arguments as of `compute_score`.

    Raises:
        RewardError: unknown data source, a method that its scorer does not have, or a ground
            truth that it cannot compare with.
    """
    scorer = scorer_of(data_source)
    default, *others = METHODS.get(scorer, ("",))
    chosen = method or (extra_info or {}).get("method")
    if chosen is None or not others:  # rows of scorers without methods may call anything so
        chosen = default
    if chosen not in (default, *others):
        known = ", ".join((default, *others))
        raise RewardError(f"{scorer} has no method {chosen!r}; it has {known}")
    problem = _truth_problem(scorer, chosen, ground_truth)
    if problem is not None:
        raise RewardError(problem)
    return scorer, chosen


def _truth_problem(scorer: str, method: str, truth: Any) -> str | None:
    """Why the scorer could not compare with this ground truth."""
    if (scorer, method) == ("reasoning_gym", "own"):  # its tasks may score without
        return None
    if truth is None:
        return (
            f"the built-in scorer {scorer} needs a ground truth: column reward_model.ground_truth, "
            "or ground_truth"
        )
    try:
        if scorer == "gsm8k" or method == "last_number":
            gsm8k.true_number(truth)
        elif scorer == "regex":
            re.compile(truth)
        elif method == "one_of" and not isinstance(json.loads(truth), list):
            return f"ground truth {truth!r} is no JSON list"
    except (ValueError, TypeError, re.error) as error:
        return str(error) if scorer != "regex" else f"ground truth {truth!r}: no pattern: {error}"
    if scorer == "tiny" and not isinstance(truth, str):
        return f"ground truth {truth!r} is no text"
    return None
