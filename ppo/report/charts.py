"""Charts as SVG text: lines, stacked areas, distributions over time.

Owns scales, ticks and shapes. Colours are classes c0, c1, ... of the page's style. Must not know
which metrics there are.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from ppo.report.downsample import Grid, Point

WIDTH, HEIGHT = 640, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 22, 8, 26
SCALE = 10
"""shapes are drawn in whole tenths of a unit, which costs fewer letters than fractions"""
PLOT_W, PLOT_H = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
NUM_COLOURS = 8
SHADES = 9
"""darknesses of a distribution's cells"""
MOST_MARKS = 200
OUTLIERS = 30.0
"""an axis this much longer than what 96 % of the points need is cut"""


class Line(NamedTuple):
    """One curve; `low` and `high` of its points are a band when several steps are one point."""

    label: str
    points: Sequence[Point]
    colour: int
    dash: int = 0
    """of three patterns, 0 = whole"""


class Axis(NamedTuple):
    """Numbers from low to high."""

    low: float
    high: float

    def share(self, value: float) -> float:
        """Where a value lies, 0 to 1, and not beyond."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


def line_chart(
    title: str, lines: Sequence[Line], span: tuple[int, int], *, marks: Iterable[int] = ()
) -> str:
    """Curves over steps on one axis. marks: steps at which something happened."""
    axis, is_cut = _value_axis(lines)
    steps = _step_axis(span)
    shapes = [_marks(marks, steps)]
    for line in lines:
        if any(point.high > point.low for point in line.points):
            shapes.append(f'<path class="b c{line.colour}" d="{_band(line.points, steps, axis)}"/>')
    for line in lines:
        kind = f"l c{line.colour}" + (f" d{line.dash}" if line.dash else "")
        shapes.append(f'<path class="{kind}" d="{_polyline(line.points, steps, axis)}"/>')
    note = " (axis cut: values beyond it are at its edge)" if is_cut else ""
    legend = "".join(
        _legend(line.label, line.colour, line.points[-1].mean, line.dash) for line in lines
    )
    return _figure(title, note, shapes, steps, axis, legend)


def stacked_chart(
    title: str, parts: Sequence[Line], span: tuple[int, int], *, marks: Iterable[int] = ()
) -> str:
    """Areas on top of each other; all parts have points at the same steps."""
    steps = _step_axis(span)
    totals = [
        sum(max(0.0, x.mean) for x in column if not math.isnan(x.mean))
        for column in zip(*(part.points for part in parts), strict=True)
    ]
    axis = Axis(0.0, _nice_ceiling(max(totals, default=1.0)))
    below = [0.0] * len(totals)
    shapes = []
    for part in parts:
        values = [0.0 if math.isnan(point.mean) else max(0.0, point.mean) for point in part.points]
        above = [a + b for a, b in zip(below, values, strict=True)]
        xs = [_x(point.step, steps) for point in part.points]
        upper = [f"{x} {_y(y, axis)}" for x, y in zip(xs, above, strict=True)]
        lower = [f"{x} {_y(y, axis)}" for x, y in zip(xs, below, strict=True)]
        shapes.append(
            f'<path class="a c{part.colour}" d="M{"L".join([*upper, *reversed(lower)])}Z"/>'
        )
        below = above
    shapes.append(_marks(marks, steps))
    legend = "".join(
        _legend(part.label, part.colour, part.points[-1].mean) for part in parts if part.points
    )
    return _figure(title, "", shapes, steps, axis, legend)


def grid_chart(title: str, grid: Grid) -> str:
    """A distribution over time: the darker a cell, the more of its steps' values it holds."""
    steps, axis = _step_axis(grid.span), Axis(grid.low, grid.high)
    if axis.high <= axis.low:
        axis = Axis(axis.low - 0.5, axis.high + 0.5)
    columns, most = len(grid.shares), max((max(c) for c in grid.shares if c), default=1.0)
    cells: dict[int, list[str]] = {}
    for number, column in enumerate(grid.shares):
        left, right = (PLOT_W * SCALE * (number + i) // columns for i in (0, 1))
        for row, share in enumerate(column):
            shade = math.ceil(math.sqrt(share / most) * SHADES)
            if shade:
                top, bottom = (PLOT_H * SCALE * (len(column) - row - i) // len(column)
                               for i in (1, 0))  # fmt: skip
                cell = f"M{left} {top}h{right - left}v{bottom - top}h{left - right}z"
                cells.setdefault(shade, []).append(cell)
    shapes = [
        f'<path class="g" style="opacity:{shade / SHADES:.2f}" d="{"".join(paths)}"/>'
        for shade, paths in sorted(cells.items())
    ]
    return _figure(title, "", shapes, steps, axis, "")


def spark(points: Sequence[Point]) -> str:
    """A curve without axes, for a line of a table."""
    axis, _ = _value_axis([Line("", points, 0)])
    steps = Axis(points[0].step, max(points[-1].step, points[0].step + 1))
    path = _polyline(points, steps, axis, width=1400, height=260)
    return f'<svg class="spark" viewBox="-20 -20 1440 300"><path class="l c0" d="{path}"/></svg>'


def short(value: float) -> str:
    """A number in a few letters: 0.0123, 12.3, 45.6k, 1e-06."""
    if math.isnan(value):
        return "nan"
    for least, size, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if least <= abs(value) < 1e13:
            return f"{value / size:.3g}{unit}"
    return f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"


def _figure(
    title: str, note: str, shapes: Iterable[str], steps: Axis, axis: Axis, legend: str
) -> str:
    ticks = [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.0f}" y2="{y:.0f}"/>'
        f'<text x="{LEFT - 6}" y="{y + 5:.0f}" text-anchor="end">{short(value)}</text>'
        for value in _ticks(axis, 4)
        for y in [TOP + PLOT_H * (1 - axis.share(value))]
    ]
    ticks += [
        f'<text x="{LEFT + PLOT_W * steps.share(value):.0f}" y="{HEIGHT - 7}" '
        f'text-anchor="middle">{value:.0f}</text>'
        for value in _ticks(steps, 6)
        if value == int(value)
    ]
    scale = f"{steps.low:.6g} {steps.high:.6g} {axis.low:.6g} {axis.high:.6g}"
    return (
        f'<figure class="card"><h3>{escape(title)}<small>{escape(note)}</small></h3>'
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" data-scale="{scale}" role="img" '
        f'aria-label="{escape(title)}"><g class="t">{"".join(ticks)}</g>'
        f'<g transform="translate({LEFT} {TOP}) scale({1 / SCALE})">{"".join(shapes)}</g></svg>'
        f"<figcaption>{legend}</figcaption></figure>"
    )


def _legend(label: str, colour: int, last: float, dash: int = 0) -> str:
    kind = f"k c{colour}" + (f" d{dash}" if dash else "")
    return f'<span class="{kind}">{escape(label)} <b>{short(last)}</b></span>'


def _marks(marks: Iterable[int], steps: Axis) -> str:
    places = sorted({_x(step, steps) for step in marks})[:MOST_MARKS]
    lines = "".join(f"M{x} 0V{PLOT_H * SCALE}" for x in places)
    return f'<path class="e" d="{lines}"/>' if lines else ""


def _polyline(
    points: Sequence[Point],
    steps: Axis,
    axis: Axis,
    *,
    width: int = PLOT_W * SCALE,
    height: int = PLOT_H * SCALE,
) -> str:
    """The means; a gap where one is not finite, and a dash of its own for a lonely point."""
    parts, pen = [], "M"
    for index, point in enumerate(points):
        if math.isnan(point.mean):
            pen = "M"
            continue
        x = round(width * steps.share(point.step))
        y = round(height * (1 - axis.share(point.mean)))
        parts.append(f"{pen}{x} {y}")
        is_last = index + 1 == len(points) or math.isnan(points[index + 1].mean)
        if pen == "M" and is_last:
            parts.append("h1")
        pen = "L"
    return "".join(parts)


def _band(points: Sequence[Point], steps: Axis, axis: Axis) -> str:
    finite = [point for point in points if not math.isnan(point.mean)]
    upper = [f"{_x(p.step, steps)} {_y(p.high, axis)}" for p in finite]
    lower = [f"{_x(p.step, steps)} {_y(p.low, axis)}" for p in reversed(finite)]
    return f"M{'L'.join([*upper, *lower])}Z"


def _x(step: float, steps: Axis) -> int:
    return round(PLOT_W * SCALE * steps.share(step))


def _y(value: float, axis: Axis) -> int:
    return round(PLOT_H * SCALE * (1 - axis.share(value)))


def _step_axis(span: tuple[int, int]) -> Axis:
    first, last = span
    return Axis(first, last) if last > first else Axis(first - 0.5, first + 0.5)


def _value_axis(lines: Sequence[Line]) -> tuple[Axis, bool]:
    """An axis for all curves, and whether spikes go beyond it."""
    points = [p for line in lines for p in line.points if not math.isnan(p.mean)]
    if not points:
        return Axis(0.0, 1.0), False
    low, high = min(p.low for p in points), max(p.high for p in points)
    means = sorted(point.mean for point in points)
    edge = len(means) // 50
    inner_low, inner_high = means[edge], means[-1 - edge]
    is_cut = edge > 0 and high - low > OUTLIERS * (inner_high - inner_low) > 0
    if is_cut:
        room = inner_high - inner_low
        low, high = max(low, inner_low - room), min(high, inner_high + room)
    if high - low <= 1e-9 * max(abs(high), abs(low)):  # a constant lies in the middle
        room = abs(high) * 0.1 or 1.0
        return Axis(low - room, high + room), is_cut
    room = 0.04 * (high - low)
    starts_at_zero = 0.0 <= low < 0.3 * high
    return Axis(0.0 if starts_at_zero else low - room, high + room), is_cut


def _ticks(axis: Axis, number: int) -> list[float]:
    """Round numbers in the axis, about so many."""
    rough = (axis.high - axis.low) / number
    size = 10.0 ** math.floor(math.log10(rough))
    step = next((m * size for m in (1, 2, 5) if m * size >= rough), 10 * size)
    first = math.ceil(axis.low / step - 1e-9)
    last = math.floor(axis.high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _nice_ceiling(value: float) -> float:
    return value * 1.05 if value > 0 else 1.0
