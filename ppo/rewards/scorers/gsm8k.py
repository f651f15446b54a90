"""Answers of GSM8K, and numbers in texts: a text in, a number out."""

import re
from decimal import Decimal, InvalidOperation

TAIL = 300
"""characters of the response, from its end, in which the answer must stand (as in verl)"""


def answer(text: str, *, method: str = "strict") -> Decimal | None:
    """The number that the text answers.

    Args:
        method: "strict" wants the form `#### 18`; "flexible" takes the last number.
    """
    tail = text[-TAIL:]
    if method != "strict":
        return last_number(tail)
    marked = re.findall(r"####\s*\$?\s*(-?[\d.,]+)", tail)
    return to_number(marked[-1]) if marked else None


def as_text(number: Decimal | None) -> str | None:
    """The same text for 18, 18.0 and 0018."""
    if not number:
        return None if number is None else "0"
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def last_number(text: str) -> Decimal | None:
    """The last number that is written in the text; thousands separators are dropped."""
    numbers = [to_number(word) for word in re.findall(r"-?[\d.,]+", text)]
    return next((number for number in reversed(numbers) if number is not None), None)


def true_number(ground_truth: object) -> Decimal:
    """The ground truth as a number. Raises ValueError when it is none."""
    number = to_number(str(ground_truth).strip())
    if number is None:
        raise ValueError(f"ground truth {ground_truth!r} is not a number")
    return number


def to_number(word: str) -> Decimal | None:
    """`1,234.50` as a number; None when it is none."""
    try:
        number = Decimal(word.replace(",", "").replace("$", "").rstrip("."))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
