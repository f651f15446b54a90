"""The report: one HTML page of one or several runs, that needs nothing else and no network.

Owns what stands where, and that the page stays small. All text that is not ours is escaped where
it enters.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

from ppo.report import charts
from ppo.report.charts import grid_chart, line_chart, short, spark, stacked_chart
from ppo.report.downsample import grid_of, points_of
from ppo.report.panels import PANELS, lines_of, memory_panel, span_of, time_lines
from ppo.report.record import Event, Record, sample_files
from ppo.report.samples import Room, sample_html, shown_samples
from ppo.report.style import SCRIPT, style

LARGEST_BYTES = 1_000_000
MOST_EVENTS = 60
"""lines of the table of events of a run"""
MOST_KINDS = 12
"""lines of the time axis of events"""
SPLITS = {"train": "training", "val": "validation"}
MOST_SPLITS = 6
MOST_CONFIG_LETTERS = 60_000


class Detail(NamedTuple):
    """How much is drawn."""

    points: int
    """of a curve"""
    columns: int
    """of a distribution"""
    moments: int
    """steps whose samples are shown"""
    room: Room


DETAILS = (
    Detail(160, 64, 3, Room(384, 3000)),
    Detail(120, 48, 3, Room(192, 1500)),
    Detail(80, 40, 2, Room(128, 800)),
    Detail(40, 24, 1, Room(64, 400)),
    Detail(20, 12, 1, Room(16, 200)),
)


def build_page(records: Sequence[Record]) -> str:
    """The page, with as much detail as LARGEST_BYTES allows."""
    page = ""
    for detail in DETAILS:
        page = _page(records, detail)
        if len(page.encode()) < LARGEST_BYTES:
            break
    return page


def _page(records: Sequence[Record], detail: Detail) -> str:
    script = SCRIPT % {
        "W": charts.PLOT_W * charts.SCALE,
        "H": charts.PLOT_H * charts.SCALE,
    }
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    title = escape(" and ".join(record.label for record in records))
    sections: list[tuple[str, Callable[[], str]]] = [
        ("Curves", lambda: _curves(records, detail)),
        ("Time and memory", lambda: _beside(records, lambda r: _time_and_memory(r, detail))),
        ("Distributions", lambda: _beside(records, lambda r: _distributions(r, detail))),
        ("Events", lambda: _beside(records, _events)),
        ("Samples", lambda: _samples(records, detail)),
        ("Configuration", lambda: _configuration(records)),
        ("All metrics", lambda: _all_metrics(records, detail)),
    ]
    body = [f"<h1>{title}</h1>", _beside(records, _head)]
    links = " ".join(f'<a href="#{_anchor(name)}">{name}</a>' for name, _ in sections)
    body.append(f"<nav>{links}</nav>")
    for name, build in sections:
        body.append(f'<h2 id="{_anchor(name)}">{name}</h2>{build()}')
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{style()}</style></head>"
        f"<body><main>{''.join(body)}</main><script>{script}</script></body></html>\n"
    )


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _beside(records: Sequence[Record], build: Callable[[Record], str]) -> str:
    """The same of each run, side by side where the screen is wide."""
    several = len(records) > 1
    parts = [
        f"<div>{f'<h3>{escape(record.label)}</h3>' if several else ''}{build(record)}</div>"
        for record in records
    ]
    return f'<div class="pair">{"".join(parts)}</div>'


def _head(record: Record) -> str:
    state = escape(str(record.status.get("state", "no status.json")))
    place = escape(str(record.folder.resolve()))
    lines = [f'<span class="state">{state}</span> {_length(record)}', f"<small>{place}</small>"]
    if record.status.get("reason"):
        lines.append(f"<pre>{escape(str(record.status['reason'])[:2000])}</pre>")
    for name, label in (
        ("critic/score/mean", "reward"),
        ("actor/ref_kl", "KL to the reference"),
        ("response_length/mean", "response length"),
        ("timing_s/step", "seconds an iteration"),
        ("perf/throughput", "tokens/s of a device"),
    ):
        if name in record.series:
            values = record.series[name].values
            lines.append(f"{label} {short(values[0])} → <b>{short(values[-1])}</b>")
    for name, series in record.series.items():
        if name.startswith("val-core/") and "/mean@" in name:
            first, best, last = series.values[0], max(series.values), series.values[-1]
            text = f"{short(first)} → <b>{short(last)}</b>, best {short(best)}"
            lines.append(f"validation {escape(name.removeprefix('val-core/'))} {text}")
    if record.starts:
        last = record.starts[-1]
        facts = [f"{len(record.starts)} start{'s' if len(record.starts) > 1 else ''}"]
        facts += [f"{key} {last[key]}" for key in ("time", "world_size", "torch") if key in last]
        facts.append(f"git {str(last.get('git_revision'))[:20]}")
        lines.append(escape(", ".join(facts)))
        lines.append(f"<pre>{escape(str(last.get('command', ''))[:3000])}</pre>")
    body = "".join(line if line.startswith("<pre") else f"<div>{line}</div>" for line in lines)
    return f'<div class="card">{body}</div>'


def _length(record: Record) -> str:
    total = record.config.get("trainer.total_training_steps")
    of = f" of {total}" if isinstance(total, int) else ""
    return f"step {record.last_step}{of}"


def _curves(records: Sequence[Record], detail: Detail) -> str:
    marks = [event.first for record in records for event in record.events]
    span, found = span_of(records), []
    for panel in PANELS:
        lines = lines_of(panel, records, detail.points)
        if lines:
            found.append(line_chart(panel.title, lines, span, marks=marks))
    return f'<div class="grid">{"".join(found)}</div>'


def _time_and_memory(record: Record, detail: Detail) -> str:
    span, marks = span_of([record]), [event.first for event in record.events]
    found = []
    if parts := time_lines(record, detail.points, span):
        found.append(stacked_chart("Seconds of an iteration by phase", parts, span, marks=marks))
    panel = memory_panel(record)
    if lines := lines_of(panel, [record], detail.points):
        found.append(line_chart(panel.title, lines, span, marks=marks))
    return "".join(found) or "<p>no times</p>"


def _distributions(record: Record, detail: Detail) -> str:
    found = [
        grid_chart(title, grid_of(record.histograms[name], detail.columns, 24))
        for name, title in (("score", "Rewards"), ("response_length", "Response lengths, tokens"))
        if name in record.histograms
    ]
    return "".join(found) or "<p>no histograms.jsonl</p>"


def _events(record: Record) -> str:
    if not record.events:
        return "<p>none: no guard, alarm, failed reward or number that is not finite</p>"
    shown = record.events[:MOST_EVENTS]
    rows = "".join(
        f'<tr><td class="n">{_steps(event)}</td><td>{escape(event.text[:300])}</td></tr>'
        for event in shown
    )
    more = len(record.events) - len(shown)
    rest = f"<p>and {more} more, the last at step {record.events[-1].last}</p>" if more else ""
    lane = _lane(record)
    return f'{lane}<div class="card"><table>{rows}</table>{rest}</div>'


def _steps(event: Event) -> str:
    if event.first == event.last:
        return str(event.first)
    return f"{event.first} to {event.last} ({event.count} steps)"


def _lane(record: Record) -> str:
    """Events on the time axis, one line for each kind."""
    first, last = span_of([record])
    scale = (charts.WIDTH - 10) / max(1, last - first)
    kinds: dict[str, list[Event]] = {}
    for event in record.events:
        kinds.setdefault(re.split(" = |:", event.text)[0], []).append(event)
    rows = []
    for number, (kind, events) in enumerate(list(kinds.items())[:MOST_KINDS]):
        y = 34 * number
        spots = "".join(
            f"M{scale * (event.first - first):.0f} {y + 26}"
            f"h{max(4, scale * (event.last - event.first)):.0f}"
            for event in events[:MOST_EVENTS]
        )
        rows.append(f'<text x="0" y="{y + 16}">{escape(kind[:70])}</text>')
        rows.append(f'<path class="s" d="{spots}"/>')
    height = 34 * len(rows) // 2
    return (
        f'<div class="card"><h3>Steps {first} to {last}</h3><svg class="chart t" '
        f'viewBox="0 0 {charts.WIDTH} {height}" role="img" aria-label="events over steps">'
        f"{''.join(rows)}</svg></div>"
    )


def _samples(records: Sequence[Record], detail: Detail) -> str:
    choice = (
        '<input type="radio" name="by" id="by-kl" checked><label for="by-kl">shade tokens by KL '
        "to the reference (red: likelier than there, blue: less likely)</label>"
        '<input type="radio" name="by" id="by-a"><label for="by-a">by advantage (green: above 0, '
        "red: below)</label>"
    )

    def cards(record: Record) -> str:
        splits, found = sample_files(record.folder), []
        for split, files in list(splits.items())[:MOST_SPLITS]:
            moments = detail.moments if len(splits) < 3 or split == "train" else 1
            found.append(f"<h3>{escape(SPLITS.get(split, split))}</h3>")
            found += [sample_html(each, detail.room) for each in shown_samples(files, moments)]
        return "".join(found) or "<p>no samples</p>"

    return choice + _beside(records, cards)


def _configuration(records: Sequence[Record]) -> str:
    found = []
    if len(records) > 1:
        found.append(f'<div class="card wide"><h3>Differences</h3>{_differences(records)}</div>')
    for record in records:
        text = escape(record.config_text[:MOST_CONFIG_LETTERS]) or "no config.yaml"
        found.append(
            f"<details><summary>config.yaml of {escape(record.label)}</summary>"
            f"<pre>{text}</pre></details>"
        )
    return "".join(found)


def _differences(records: Sequence[Record]) -> str:
    """Keys whose values are not the same in all runs."""
    keys = sorted({key for record in records for key in record.config})
    rows = []
    for key in keys:
        texts = [_value(record, key) for record in records]
        if len(set(texts)) > 1:
            cells = "".join(f"<td>{escape(text[:200])}</td>" for text in texts)
            rows.append(f"<tr><td>{escape(key)}</td>{cells}</tr>")
    names = "".join(f"<th>{escape(record.label)}</th>" for record in records)
    table = f"<table><tr><th>key</th>{names}</tr>{''.join(rows)}</table>"
    return table if rows else "<p>none</p>"


def _value(record: Record, key: str) -> str:
    if key not in record.config:
        return "(not there)"
    value: Any = record.config[key]
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _all_metrics(records: Sequence[Record], detail: Detail) -> str:
    rooms: dict[str, list[str]] = {}
    for name in sorted({name for record in records for name in record.series}):
        rooms.setdefault(name.split("/")[0], []).append(name)
    return "".join(_room(room, names, records, detail) for room, names in rooms.items())


def _room(room: str, names: Sequence[str], records: Sequence[Record], detail: Detail) -> str:
    def cells(name: str) -> Iterator[str]:
        for record in records:
            series = record.series.get(name)
            if series is None:
                yield "<td></td><td></td>"
                continue
            points = points_of(series, detail.points // 3, span_of(records))
            numbers = f"{short(series.values[0])} → {short(series.last)}"
            yield f'<td>{spark(points)}</td><td class="n">{numbers}</td>'

    rows = "".join(f"<tr><td>{escape(name)}</td>{''.join(cells(name))}</tr>" for name in names)
    return (
        f"<details><summary>{escape(room)} ({len(names)})</summary>"
        f'<div class="card wide"><table>{rows}</table></div></details>'
    )
