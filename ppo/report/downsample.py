"""Many steps as few points that still show every spike."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ppo.report.record import Histogram, Series


class Point(NamedTuple):
    """Neighbouring steps as one: mean, smallest and largest of the finite values; NaN of none."""

    step: float
    """the middle of them"""
    mean: float
    low: float
    high: float


def points_of(series: Series, most: int, span: tuple[int, int]) -> list[Point]:
    """At most so many points of equally wide parts of the span (first step, last step)."""
    first, last = span
    steps, values = series
    width = max(1.0, (last - first + 1) / most)
    points, start = [], 0
    while start < len(steps):
        end_step = first + (math.floor((steps[start] - first) / width) + 1) * width
        end = start + 1
        while end < len(steps) and steps[end] < end_step:
            end += 1
        finite = [value for value in values[start:end] if math.isfinite(value)] or [math.nan]
        middle = (steps[start] + steps[end - 1]) / 2
        points.append(Point(middle, sum(finite) / len(finite), min(finite), max(finite)))
        start = end
    return points


class Grid(NamedTuple):
    """Distributions over time: shares[column][row], each column summing to 1."""

    span: tuple[int, int]
    low: float
    high: float
    shares: list[list[float]]
    """an empty column where no step has values"""


def grid_of(histograms: Sequence[Histogram], columns: int, rows: int) -> Grid:
    """Histograms with bins of their own on one grid; within a bin values lie anywhere."""
    first, last = histograms[0].step, histograms[-1].step
    low, high = min(h.low for h in histograms), max(h.high for h in histograms)
    columns = min(columns, last - first + 1)
    totals: list[list[float]] = [[] for _ in range(columns)]
    for histogram in histograms:
        column = (histogram.step - first) * columns // (last - first + 1)
        totals[column] = totals[column] or [0.0] * rows
        _spread(histogram, totals[column], low, (high - low) / rows or 1.0)
    shares = [[n / sum(column) for n in column] if sum(column) else [] for column in totals]
    return Grid((first, last), low, high, shares)


def _spread(histogram: Histogram, column: list[float], low: float, row_height: float) -> None:
    """Add the counts of a histogram to the rows that its bins overlap."""
    width = (histogram.high - histogram.low) / len(histogram.counts)
    for index, count in enumerate(histogram.counts):
        if not count:
            continue
        start = (histogram.low + index * width - low) / row_height
        end = start + width / row_height
        top = len(column) - 1
        for row in range(min(top, max(0, int(start))), min(top, max(0, int(end))) + 1):
            overlap = min(end, row + 1) - max(start, row)
            inside = overlap / (end - start) if end > start else 1.0
            column[row] += count * max(0.0, inside)
