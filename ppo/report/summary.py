"""How a run has ended, as a few lines of text for the end of a script.

Owns the layout. Names of metrics and models' texts come from the run and are shown as plain text.
"""

import math
from collections.abc import Iterator
from pathlib import Path

from ppo.report.charts import short
from ppo.report.record import Record, Series, load_record
from ppo.report.watch import sparkline

WIDTH = 40
"""letters of the longest bar"""
MOST_BARS = 20
FIGURES = (
    ("sampled reward", "critic/score/mean"),
    ("KL to reference", "actor/ref_kl"),
    ("explained variance", "critic/vf_explained_var"),
)


def summary(folder: Path) -> str:
    """Outcome, each validation as a bar, and the course of a few metrics. Raises NoRun."""
    record = load_record(folder)
    reason = str(record.status.get("reason") or "").splitlines()[:1]
    lines = [
        f"run {folder}: {record.status.get('state', 'no status.json')} after step "
        f"{record.last_step}{': ' + reason[0] if reason else ''}"
    ]
    for name, series in record.series.items():
        if name.startswith("val-core/") and "/mean@" in name:
            lines += ["", f"validation, {name.removeprefix('val-core/')}", *_bars(series)]
    lines += ["", *_courses(record)]
    return "\n".join(
        "".join(c if c.isprintable() else "\u00b7" for c in line) for line in lines
    ).rstrip()


def _bars(series: Series) -> Iterator[str]:
    """A line for each step; of many, some evenly spaced, the first and the last among them."""
    points = list(zip(series.steps, series.values, strict=True))
    if len(points) > MOST_BARS:
        places = [round(i * (len(points) - 1) / (MOST_BARS - 1)) for i in range(MOST_BARS)]
        points = [points[place] for place in places]
    finite = [value for _, value in points if math.isfinite(value)]
    low, high = min([0.0, *finite]), max([0.0, *finite])
    for step, value in points:
        share = (value - low) / (high - low) if high > low and math.isfinite(value) else 0.0
        yield f"  step {step:>6}  {value:>8.3f}  {'█' * round(WIDTH * share)}".rstrip()


def _courses(record: Record) -> Iterator[str]:
    for label, name in FIGURES:
        if name in record.series:
            series = record.series[name]
            first, last = short(series.values[0]), short(series.last)
            recent = list(series.values[-WIDTH:])
            yield f"{label:<19} {sparkline(recent)}  {first} to {last}"
