"""The built-in scorers, picked by data_source. Texts and numbers in, a number out."""

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

METHODS = {"gsm8k": ("strict", "flexible"), "reasoning_gym": ("own", "last_number")}
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
            of texts; regex: the pattern; tiny: the text to copy.
        method: of gsm8k and reasoning_gym (METHODS); None = extra_info["method"] if given, else
            the default.

    Raises:
        RewardError: unknown data source, a method that its scorer does not have, or no ground
            truth.
    """
    scorer = scorer_of(data_source)
    _require_truth(scorer, ground_truth)
    extra = extra_info or {}
    chosen = method or extra.get("method")
    if chosen is not None and chosen not in METHODS.get(scorer, (chosen,)):
        known = ", ".join(METHODS[scorer])
        raise RewardError(f"{scorer} has no method {chosen!r}; it has {known}")
    match scorer:
        case "gsm8k":
            return gsm8k.score(solution_str, ground_truth, method=chosen or "strict")
        case "math":
            return math_answers.score(solution_str, ground_truth)
        case "reasoning_gym":
            task = data_source.partition("/")[2]
            return gym.score(solution_str, ground_truth, extra, task=task, method=chosen or "own")
        case "exact_match":
            truths = ground_truth if isinstance(ground_truth, list) else [ground_truth]
            return float(solution_str.strip() in [str(truth).strip() for truth in truths])
        case "regex":
            return float(re.search(ground_truth, solution_str) is not None)
    assert scorer == "tiny", scorer
    return tiny.score(solution_str, ground_truth)


def _require_truth(scorer: str, ground_truth: Any) -> None:
    if ground_truth is None and scorer != "reasoning_gym":  # its tasks may score without
        raise RewardError(
            f"the built-in scorer {scorer} needs a ground truth: column reward_model.ground_truth, "
            "or ground_truth"
        )
