"""A run as its folder tells it: numbers over steps, distributions, events, configuration.

Owns reading: whatever a file lacks, or a live run has half written, is left out. Must not know how
any of it is shown.
"""

import json
import math
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

EVENT_ROOMS = ("guard/", "alarm/", "alarms/")
"""metrics of these names are events"""
SAMPLES = re.compile(r"(train|val(?:-[^/]+)?)_(\d{8,})\.jsonl")
REWARD_FAILURES = ("reward/failed", "reward/timeout")


class NoRun(ValueError):
    """The folder holds no run with metrics."""


class Series(NamedTuple):
    """A metric over steps, ascending; NaN where it was not finite."""

    steps: array
    values: array

    @property
    def last(self) -> float:
        """Its newest value."""
        return self.values[-1]


class Histogram(NamedTuple):
    """How many values lie in equal bins between low and high."""

    step: int
    low: float
    high: float
    counts: list[int]


class Event(NamedTuple):
    """Something that happened in the steps from first to last."""

    first: int
    last: int
    text: str
    count: int = 1
    """steps of it"""


@dataclass
class Record:
    """One run."""

    folder: Path
    series: dict[str, Series]
    histograms: dict[str, list[Histogram]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)
    config_text: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    """by dotted key"""

    label: str = ""
    """tells it from the other runs of a report"""

    @property
    def first_step(self) -> int:
        """0 where it validated before it trained."""
        return min(series.steps[0] for series in self.series.values())

    @property
    def last_step(self) -> int:
        """The newest step that has a row."""
        return max(series.steps[-1] for series in self.series.values())


def load_records(folders: Sequence[Path]) -> list[Record]:
    """Several runs, with labels as short as can be. Raises NoRun."""
    records = [load_record(folder) for folder in dict.fromkeys(folders)]
    names = [record.folder.resolve().name for record in records]
    if len(set(names)) == len(names):
        for record, name in zip(records, names, strict=True):
            record.label = name
    return records


def load_record(folder: Path) -> Record:
    """Read all but the samples. Raises NoRun where no row of a step is found."""
    if not folder.is_dir():
        raise NoRun(f"{folder}: no such folder; name a run folder (it has metrics.jsonl)")
    series = _series(_rows(folder / "metrics.jsonl"))
    if not series:
        others = sorted(str(path.parent) for path in folder.glob("*/metrics.jsonl"))
        found = f"; there is {', '.join(others[:5])}" if others else ""
        raise NoRun(
            f"{folder}: no run with metrics: metrics.jsonl is not there or holds no step (it is "
            f"written with jsonl in trainer.logger){found}"
        )
    text = _text(folder / "config.yaml")
    status = _json_object(_text(folder / "status.json"))
    return Record(
        folder=folder,
        series=series,
        histograms=_histograms(_rows(folder / "histograms.jsonl")),
        events=_events(series, status),
        status=status,
        starts=list(_rows(folder / "starts.jsonl")),
        config_text=text,
        config=dict(_flat(_yaml(text))),
        label=str(folder),
    )


def sample_files(folder: Path) -> dict[str, dict[int, Path]]:
    """Files of samples by split (train, val, val-NAME) and step, both ascending."""
    found: dict[str, dict[int, Path]] = {}
    for path in sorted((folder / "samples").glob("*.jsonl")):
        if match := SAMPLES.fullmatch(path.name):
            found.setdefault(match[1], {})[int(match[2])] = path
    return {split: dict(sorted(files.items())) for split, files in found.items()}


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Rows of a samples file; what is no row is left out."""
    return list(_rows(path))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """JSON objects of a file of lines; a torn one, as a live run may leave it, is skipped."""
    try:
        with path.open("rb") as file:
            for line in file:
                if row := _json_object(line):
                    yield row
    except OSError:
        return


def _json_object(text: str | bytes) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _series(rows: Iterator[Mapping[str, Any]]) -> dict[str, Series]:
    columns: dict[str, Series] = {}
    for row in rows:
        step = row.get("step")
        if type(step) is not int:
            continue
        for name, value in row.items():
            if name != "step" and (value is None or type(value) in (int, float)):
                column = columns.setdefault(name, Series(array("q"), array("d")))
                column.steps.append(step)
                column.values.append(math.nan if value is None else value)
    return {name: _in_order(column) for name, column in sorted(columns.items())}


def _in_order(series: Series) -> Series:
    """Each step once, the last word on it."""
    if all(a < b for a, b in pairwise(series.steps)):
        return series
    latest = dict(sorted(dict(zip(*series, strict=True)).items()))
    return Series(array("q", latest), array("d", latest.values()))


def _histograms(rows: Iterator[Mapping[str, Any]]) -> dict[str, list[Histogram]]:
    found: dict[str, dict[int, Histogram]] = {}
    for row in rows:
        name, counts = row.get("name"), row.get("counts")
        numbers: list[Any] = [row.get(key) for key in ("step", "low", "high")]
        if not isinstance(name, str) or not isinstance(counts, list) or not counts:
            continue
        if all(type(x) in (int, float) and math.isfinite(x) for x in [*numbers, *counts]):
            step, low, high = numbers
            found.setdefault(name, {})[int(step)] = Histogram(int(step), low, high, counts)
    return {name: [by_step[step] for step in sorted(by_step)] for name, by_step in found.items()}


def _events(series: Mapping[str, Series], status: Mapping[str, Any]) -> list[Event]:
    found: list[Event] = []
    for name, column in series.items():
        if name.startswith(EVENT_ROOMS):
            found += _fired(name, column)
        elif name in REWARD_FAILURES:
            found += _runs(column, lambda value: value > 0, f"{name} above 0")
        found += _runs(column, math.isnan, f"{name} is not finite")
    return sorted([*found, *_alarms(status)])


def _fired(name: str, column: Series) -> Iterator[Event]:
    """One event for each run of steps in which a guard's number is the same and not at rest.

    At rest a number is 0, or not there; a factor is 1.
    """
    rest = {0.0, 1.0} if "factor" in name else {0.0}
    now: Event | None = None
    for step, value in zip(*column, strict=True):
        text = f"{name} = {value:.4g}"
        if now is not None and now.text == text and now.last == step - 1:
            now = now._replace(last=step, count=now.count + 1)
            continue
        if now is not None:
            yield now
        now = None if value in rest or math.isnan(value) else Event(step, step, text)
    if now is not None:
        yield now


def _runs(column: Series, is_event: Any, text: str) -> Iterator[Event]:
    """One event for each run of rows of which it is true."""
    first: int | None = None
    last, count = 0, 0
    for step, value in zip(*column, strict=True):
        if is_event(value):
            first = step if first is None else first
            last, count = step, count + 1
        elif first is not None:
            yield Event(first, last, text, count)
            first, count = None, 0
    if first is not None:
        yield Event(first, last, text, count)


def _alarms(status: Mapping[str, Any]) -> Iterator[Event]:
    """Alarms of status.json: a mapping of names, or a list of texts or of objects with a step."""
    alarms = status.get("alarms")
    items = alarms.items() if isinstance(alarms, dict) else enumerate(alarms or [])
    now = status.get("step")
    for key, alarm in items:
        step, name = now, f"{key}: " if isinstance(alarms, dict) else ""
        if isinstance(alarm, dict):
            step = alarm.get("step", alarm.get("since", now))
            alarm = ", ".join(f"{k} {v}" for k, v in alarm.items() if k != "step")
        step = step if type(step) is int else 0
        yield Event(step, step, f"alarm {name}{alarm}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        return None


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, tree
