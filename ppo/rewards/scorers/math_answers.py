"""Scorer of competition mathematics (MATH, AIME): the boxed answer against the true one.

math-verify decides where it is installed (`pip install -e .[data]`); else normalised texts are
compared. A text in, a number out.
"""

import re
from importlib.util import find_spec


def score(text: str, ground_truth: object) -> float:
    """1 when the answer of the text equals the ground truth (LaTeX, without \\boxed), else 0.

    The answer is the last box; without one math-verify looks for an expression in the text.
    """
    truth, answer = str(ground_truth), last_boxed(text)
    if find_spec("math_verify") is not None:
        return _verified(text if answer is None else f"\\boxed{{{answer}}}", truth)
    return float(answer is not None and normalize(answer) == normalize(truth))


def _verified(text: str, truth: str) -> float:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    wanted = parse(f"\\boxed{{{truth}}}", extraction_config=[LatexExtractionConfig()])
    found = parse(text, extraction_config=[ExprExtractionConfig(), LatexExtractionConfig()])
    return float(verify(wanted, found))


def last_boxed(text: str) -> str | None:
    """What stands in the last complete \\boxed{...} of the text, braces matched."""
    for start in reversed([match.end() for match in re.finditer(r"\\f?boxed\s*\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start:end]
    return None


def normalize(answer: str) -> str:
    """The LaTeX answer without what does not change its value: space, sizes, units' markup."""
    answer = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", answer)
    answer = re.sub(r"\\[dt]frac", r"\\frac", answer)
    answer = re.sub(r"\\(left|right|[,;:! ])|\\?\$|\\?%|\^\\circ|\^\{\\circ\}|\s", "", answer)
    answer = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", answer)
    answer = re.sub(r"(?<=\d),(?=\d{3}\b)", "", answer)
    return re.sub(r"(?<![\d])\.(?=\d)", "0.", answer).rstrip(".")
