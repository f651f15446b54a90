"""A reward of one's own: the share of a response that is the wanted letter."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float | str]:
    """`score` trains; other numbers become metrics; `pred` is what the response answers."""
    text = solution_str.strip()
    share = text.count(ground_truth) / max(len(text), 1)
    return {"score": share, "letters_only": float(text.isalpha()), "pred": text[:1]}
