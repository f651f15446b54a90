"""Scorer of competition mathematics (MATH, AIME): the boxed answer against the true one.

math-verify decides where it is installed (`pip install -e .[data]`); else normalised texts are
compared. A text in, a number out.
"""

import re
import threading
from importlib.util import find_spec


def judge(text: str, ground_truth: object) -> tuple[float, str | None]:
    """1 when the answer of the text equals the ground truth (LaTeX, without \\boxed), else 0; and
    the answer, normalised.

    The answer is the last box; without one math-verify looks for an expression in the text.
    """
    truth, boxed = str(ground_truth), last_boxed(text)
    answer = None if boxed is None else normalize(boxed)
    if find_spec("math_verify") is not None:
        return _verified(text if boxed is None else f"\\boxed{{{boxed}}}", truth), answer
    return float(answer is not None and answer == normalize(truth)), answer


def _verified(text: str, truth: str) -> float:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # seconds; a signal, which a thread cannot have: what an episode's code calls its limits bound
    limit = 5 if threading.current_thread() is threading.main_thread() else 0
    latex, plain = LatexExtractionConfig(), ExprExtractionConfig()
    wanted = parse(f"\\boxed{{{truth}}}", [latex], parsing_timeout=limit)
    found = parse(text, [plain, latex], parsing_timeout=limit)
    return float(verify(wanted, found, timeout_seconds=limit))


def last_boxed(text: str) -> str | None:
    """What stands in the last complete \\boxed{...} of the text, braces matched.

    One pass, whatever the text: a response may be nothing but boxes that are never closed.
    """
    opened: list[int] = []  # where a box's content begins; 0 for another brace
    last = slice(0, 0)
    for brace in re.finditer(r"(\\f?boxed\s*)?\{|\}", text):
        if brace[0] != "}":
            opened.append(brace.end() if brace[1] else 0)
        elif opened and (start := opened.pop()) > last.start:
            last = slice(start, brace.start())
    return text[last] if last.start else None


def normalize(answer: str) -> str:
    """The LaTeX answer without what does not change its value: space, sizes, units' markup."""
    answer = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", answer)
    answer = re.sub(r"\\[dt]frac", r"\\frac", answer)
    answer = re.sub(r"\\(left|right|[,;:! ])|\\?\$|\\?%|\^\\circ|\^\{\\circ\}|\s", "", answer)
    answer = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", answer)
    answer = re.sub(r"(?<=\d),(?=\d{3}\b)", "", answer)
    return re.sub(r"(?<![\d])\.(?=\d)", "0.", answer).rstrip(".")
