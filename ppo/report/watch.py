"""A live run on one screen of a terminal.

Owns the layout as text. What models have written is shown without control characters, so that no
sample can move the cursor or change the terminal.
"""

import math
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ppo.report.charts import short
from ppo.report.downsample import points_of
from ppo.report.panels import INSIDE_GEN, OUTSIDE_STEP, PHASES, memory_panel
from ppo.report.record import Record, Series, load_record, read_samples, sample_files
from ppo.report.samples import prompt_text

BLOCKS = "▁▂▃▄▅▆▇█"
ROWS = (
    ("reward", "critic/score/mean"),
    ("KL to ref", "actor/ref_kl"),
    ("KL of update", "actor/ppo_kl_k3"),
    ("clip share", "actor/pg_clipfrac"),
    ("entropy", "actor/entropy"),
    ("explained var", "critic/vf_explained_var"),
    ("length", "response_length/mean"),
    ("cut by length", "response_length/clip_ratio"),
    ("grad norm", "actor/grad_norm"),
    ("tokens/s/gpu", "perf/throughput"),
)
NAME_LETTERS = 16
NUMBERS_LETTERS = 34
STALE_S = 60.0
"""without a new row for this much longer than an iteration takes, the age is shown"""


def watch(folder: Path, *, every_s: float) -> None:
    """Show the run, again and again, until Ctrl-C."""
    while True:
        width, height = shutil.get_terminal_size()
        text = dashboard(folder, width=width, height=height)
        sys.stdout.write(f"\x1b[H\x1b[2J{text}")
        sys.stdout.flush()
        time.sleep(max(0.2, every_s))


def dashboard(folder: Path, *, width: int, height: int) -> str:
    """The screen: at most `height` lines of at most `width` letters. Raises NoRun."""
    record = load_record(folder)
    lines = [*_head(record), "", *_curves(record, width), "", *_phases(record, width)]
    lines += [f"event at step {event.first}: {event.text}" for event in record.events[-3:]]
    lines += ["", *_last_samples(record, width)]
    return "\n".join(_clean(line)[:width] for line in lines[: max(1, height - 1)])


def sparkline(values: Sequence[float]) -> str:
    """One letter a value, as high as it is between the smallest and the largest; NaN is a gap."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low, high = min(finite), max(finite)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        BLOCKS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values
    )


def _head(record: Record) -> Iterator[str]:
    state = record.status.get("state", "no status.json")
    total = record.config.get("trainer.total_training_steps")
    done = f"step {record.last_step}" + (f" of {total}" if isinstance(total, int) else "")
    parts = [str(state), done]
    seconds = record.series.get("timing_s/step")
    if seconds is not None:
        recent = [x for x in seconds.values[-10:] if math.isfinite(x)]
        mean = sum(recent) / max(1, len(recent))
        parts.append(f"{mean:.1f} s an iteration")
        if isinstance(total, int) and state == "running":
            parts.append(f"{_duration(mean * max(0, total - record.last_step))} left")
        age = time.time() - (record.folder / "metrics.jsonl").stat().st_mtime
        if state == "running" and age > STALE_S + mean:
            parts.append(f"no new row for {_duration(age)}")
    yield " | ".join([*parts, record.label])
    if record.status.get("reason"):
        yield str(record.status["reason"]).splitlines()[0]


def _curves(record: Record, width: int) -> Iterator[str]:
    validations = [
        (f"val {name.removeprefix('val-core/').split('/')[0]}", name)
        for name in record.series
        if name.startswith("val-core/") and "/mean@" in name
    ]
    for label, name in [*ROWS[:1], *validations[:4], *ROWS[1:]]:
        if name in record.series:
            yield _curve(label, record.series[name], width)


def _curve(label: str, series: Series, width: int) -> str:
    room = max(8, width - NAME_LETTERS - NUMBERS_LETTERS)
    span = series.steps[0], series.steps[-1]
    values = [point.mean for point in points_of(series, room, span)]
    finite = [value for value in series.values if math.isfinite(value)] or [math.nan]
    numbers = f"{short(series.last):>8} ({short(min(finite))} to {short(max(finite))})"
    return f"{label:<{NAME_LETTERS}.{NAME_LETTERS - 1}}{sparkline(values):<{room}} {numbers}"


def _phases(record: Record, width: int) -> Iterator[str]:
    """Seconds of the phases of the last iteration as bars, and device memory."""
    step = record.series.get("timing_s/step")
    if step is None:
        return
    now, total = step.steps[-1], step.last
    for name in (*PHASES, *OUTSIDE_STEP):
        series = record.series.get(f"timing_s/{name}")
        if series is None or series.steps[-1] != now or not math.isfinite(series.last):
            continue
        label = f"  {name}" if name in INSIDE_GEN else name
        share = min(1.0, series.last / total) if total > 0 else 0.0
        room = max(8, width - NAME_LETTERS - NUMBERS_LETTERS)
        bar = "█" * round(room * share)
        yield f"{label:<{NAME_LETTERS}.{NAME_LETTERS}}{bar:<{room}} {series.last:>8.2f} s"
    names = [name for name in record.series if name.startswith("memory_gib/")]
    names = names or [n for n in memory_panel(record).patterns if n in record.series]
    parts = [f"{name.split('/')[1]} {record.series[name].last:.1f}" for name in names]
    if parts:
        yield "memory, GiB: " + ", ".join(parts)


def _last_samples(record: Record, width: int) -> Iterator[str]:
    for split, files in list(sample_files(record.folder).items())[:2]:
        step = max(files)
        for row in read_samples(files[step])[:2]:
            yield f"{split} sample of step {step}: reward {row.get('score')}, " + (
                f"{row.get('response_length')} tokens, ended by {row.get('finish_reason')}"
            )
            prompt, response = prompt_text(row.get("prompt")), str(row.get("response", ""))
            yield "  > " + _one_line(prompt)[-(width - 4) :]
            yield "  < " + _one_line(response)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _clean(text: str) -> str:
    """Without what a terminal would act on."""
    return "".join(c if c.isprintable() else "\u00b7" for c in text)


def _duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours} h {rest // 60:02d} min" if hours else f"{rest // 60} min {rest % 60:02d} s"
