"""Samples of a run for people: which of them, and each as HTML with its tokens shaded.

Everything in a sample comes from models and data: it is escaped, here, and nowhere trusted.
"""

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from ppo.report.charts import short
from ppo.report.record import read_samples

STRENGTHS = 6
"""shades of a token's KL and advantage"""


class Shown(NamedTuple):
    """A sample, and why it is shown."""

    why: str
    step: int
    row: dict[str, Any]


class Room(NamedTuple):
    """How much of each sample is shown."""

    tokens: int
    letters: int


def shown_samples(files: Mapping[int, Path], most_moments: int) -> list[Shown]:
    """Best, worst and another one of the first, last, and middle steps of the files."""
    steps = list(files)
    last = len(steps) - 1
    parts = max(1, most_moments - 1)
    indices = {round(last * i / parts) for i in range(most_moments)} if most_moments > 1 else {last}
    found = [choose(read_samples(files[steps[i]]), steps[i]) for i in sorted(indices)]
    return [shown for moment in found for shown in moment]


def choose(rows: Sequence[dict[str, Any]], step: int) -> Iterator[Shown]:
    """The best, the worst and another one, each once; a failed one too."""
    scored = [row for row in rows if _number(row.get("score")) is not None]
    left = list(scored)
    for why, pick in (("best", max), ("worst", min)):
        if left:
            row = pick(left, key=lambda row: row["score"])
            left.remove(row)
            yield Shown(why, step, row)
    if left:
        yield Shown("random", step, random.Random(step).choice(left))
    failed = next((row for row in rows if row.get("failure")), None)
    if failed is not None:
        yield Shown("failed", step, failed)


def sample_html(shown: Shown, room: Room) -> str:
    """One sample as a card."""
    row, parts = shown.row, []
    facts = [f"step {shown.step}", shown.why]
    score = _number(row.get("score"))
    facts.append("no reward" if score is None else f"reward {short(score)}")
    for name, label in (("finish_reason", "ended by"), ("response_length", "tokens")):
        if row.get(name) is not None:
            facts.append(f"{label} {row[name]}")
    if row.get("data_source"):
        facts.append(str(row["data_source"]))
    parts.append(f"<h4>{' · '.join(_escaped(fact) for fact in facts)}</h4>")
    if isinstance(row.get("messages"), list):  # of an episode: all turns
        parts.append(_block("conversation", prompt_text(row["messages"]), 2 * room.letters))
    else:
        parts.append(_block("prompt", prompt_text(row.get("prompt")), room.letters))
    tokens = row.get("tokens")
    shaded = tokens_html(tokens, room.tokens) if isinstance(tokens, dict) else ""
    response = str(row.get("response", ""))
    if shaded:
        parts.append(f'<p class="w">response</p><pre class="tok">{shaded}</pre>')
    else:
        parts.append(_block("response", response, 2 * room.letters))
    for name in ("ground_truth", "failure"):
        if row.get(name) not in (None, ""):
            parts.append(_block(name.replace("_", " "), str(row[name]), room.letters // 2))
    components = row.get("components")
    if isinstance(components, dict) and len(components) > 1:
        text = ", ".join(f"{name} {_component(value)}" for name, value in components.items())
        parts.append(_block("parts of the reward", text, room.letters // 2))
    return f'<article class="card">{"".join(parts)}</article>'


def tokens_html(tokens: Mapping[str, Any], most: int) -> str:
    """Tokens as elements with classes k1.. (KL) and p1.. or n1.. (advantage); title has values.

    Shades are of the largest absolute value in the sample. Empty where the lists do not fit.
    """
    texts = tokens.get("text")
    if not isinstance(texts, list):
        return ""
    kl, advantage = (_numbers(tokens.get(name), len(texts)) for name in ("kl", "advantage"))
    most_kl, most_advantage = _largest(kl), _largest(advantage)
    parts = []
    for index, text in enumerate(texts[:most]):
        classes, values = [], []
        if kl is not None:
            values.append(f"KL {short(kl[index])}")
            if shade := _shade(kl[index], most_kl):
                classes.append(f"k{shade}" if kl[index] > 0 else f"m{shade}")
        if advantage is not None:
            values.append(f"A {short(advantage[index])}")
            if shade := _shade(advantage[index], most_advantage):
                classes.append(f"p{shade}" if advantage[index] > 0 else f"n{shade}")
        kind = f' class="{" ".join(classes)}"' if classes else ""
        title = f' title="{", ".join(values)}"' if values else ""
        parts.append(f"<i{kind}{title}>{_escaped(str(text))}</i>")
    if len(texts) > most:
        parts.append(f"<u> ... {len(texts) - most} tokens more</u>")
    return "".join(parts)


def prompt_text(prompt: Any) -> str:
    """A conversation, or plain text, as text."""
    if isinstance(prompt, list) and all(isinstance(m, dict) for m in prompt):
        return "\n".join(f"[{m.get('role', '?')}] {m.get('content', '')}" for m in prompt)
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)


def _block(label: str, text: str, letters: int) -> str:
    if len(text) > letters:
        head, tail = text[: letters * 2 // 3], text[len(text) - letters // 3 :]
        text = f"{head}\n... {len(text) - letters} letters ...\n{tail}"
    return f'<p class="w">{_escaped(label)}</p><pre>{_escaped(text)}</pre>'


def _escaped(text: str) -> str:
    """Safe in HTML; characters that no file or browser takes are shown as such."""
    known = "".join(
        c if c in "\n\t" or (ord(c) >= 32 and ord(c) != 127) else "\u00b7" for c in text
    )
    return escape(known).encode("utf-8", "replace").decode()


def _component(value: Any) -> str:
    number = _number(value)
    return str(value) if number is None else short(number)


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) and math.isfinite(value) else None


def _numbers(values: Any, length: int) -> list[float] | None:
    if not isinstance(values, list) or len(values) != length:
        return None
    return [0.0 if (number := _number(value)) is None else number for value in values]


def _largest(values: Sequence[float] | None) -> float:
    return max(map(abs, values), default=0.0) if values else 0.0


def _shade(value: float, largest: float) -> int:
    return math.ceil(abs(value) / largest * STRENGTHS - 0.5) if largest > 0 else 0
