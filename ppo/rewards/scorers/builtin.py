"""The built-in scorers, picked by data_source. Texts and numbers in, a number out."""

import json
import re
from collections.abc import Mapping
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
    scorer, chosen = check(data_source, ground_truth, extra_info, method=method)
    match scorer:
        case "gsm8k":
            return gsm8k.score(solution_str, ground_truth, method=chosen)
        case "math":
            return math_answers.score(solution_str, ground_truth)
        case "reasoning_gym":
            task, extra = data_source.partition("/")[2], extra_info or {}
            return gym.score(solution_str, ground_truth, extra, task=task, method=chosen)
        case "exact_match" if chosen == "last_number":
            found = gsm8k.last_number(solution_str)
            return float(found is not None and found == gsm8k.true_number(ground_truth))
        case "exact_match":
            truths = json.loads(ground_truth) if chosen == "one_of" else ground_truth
            truths = truths if isinstance(truths, list) else [truths]
            return float(solution_str.strip() in [str(truth).strip() for truth in truths])
        case "regex":
            return float(re.search(ground_truth, solution_str) is not None)
    assert scorer == "tiny", scorer
    return tiny.score(solution_str, ground_truth)


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
    score = compute_score(data_source, solution_str, ground_truth, extra_info, method=method)
    _, chosen = check(data_source, ground_truth, extra_info, method=method)
    return {"score": score, "pred": answer(scorer_of(data_source), chosen, solution_str)}


def answer(scorer: str, method: str, text: str) -> str | None:
    """What a response answers, in the form in which equal answers are equal texts."""
    match scorer:
        case "gsm8k":
            return gsm8k.as_text(gsm8k.answer(text, method=method))
        case "math":
            boxed = math_answers.last_boxed(text)
            return None if boxed is None else math_answers.normalize(boxed)
        case "reasoning_gym" | "exact_match" if method == "last_number":
            return gsm8k.as_text(gsm8k.last_number(text))
        case "reasoning_gym":
            return gym.answer(text)
        case "exact_match" | "tiny":
            return text.strip()
    return None


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
