"""Geometry of the page's charts: values become positions in percent of the plot; the template draws them. Imports no torch.

Plots are drawn in a 100 x 100 box that stretches with the page; the text around it is HTML and keeps its size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from crmatch.analysis.curves import Points

COLORS = 8
"""Number of distinguishable colors."""
LARGEST = 1e100
"""Larger values and NaN are not drawn."""


class Series(NamedTuple):
    """The input of a line: its name, (step, value) points, its color 1..`COLORS`, and whether it is dashed."""

    label: str
    points: Points
    color: int
    dashed: bool = False


class Line(NamedTuple):
    """A series to draw: its points as the attribute of an SVG polyline, and its last value as text."""

    series: Series
    points: str
    last: str


class Chart(NamedTuple):
    """A chart with its lines, and its ticks as (position in percent from the left or the top, text)."""

    title: str
    note: str
    unit: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    lines: list[Line]


def line_chart(
    title: str, series: Sequence[Series], *, unit: str = "%", note: str = "", top: float | None = None
) -> Chart | None:
    """A chart of values over steps, from 0 to `top` or to a round number above all values; None without points."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return None
    width = max(step for one in drawn for step, _ in one.points) or 1
    values = [value for one in drawn for _, value in one.points if abs(value) < LARGEST]
    y_marks = round_marks(min([0.0, *values]), top or max([*values, 1e-9]))
    low, high = y_marks[0], y_marks[-1]

    def height(value: float) -> float:
        return 100 * (high - value) / (high - low)

    lines = []
    for one in drawn:
        points = [f"{100 * step / width:.2f},{height(value):.2f}" for step, value in one.points if abs(value) < LARGEST]
        last = one.points[-1][1]
        lines.append(Line(one, " ".join(points), f"{last:.2f} %" if unit == "%" else f"{last:.3g}"))
    x_ticks = [(100 * mark / width, f"{mark:,.0f}") for mark in round_marks(0, width) if mark <= width]
    return Chart(title, note, unit, x_ticks, [(height(mark), f"{mark:,.10g}") for mark in y_marks], lines)


def round_marks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` + 1 round numbers, 1, 2 or 5 times a power of ten apart, that cover `low` to `high`."""
    span = max(high - low, 1e-9)
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= count)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(place * step, 12) for place in range(first, max(last, first + 1) + 1)]
