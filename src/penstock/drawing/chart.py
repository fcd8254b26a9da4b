"""A line chart for losses: lines that lie on each other all stay visible, as later ones are dashed.

That two lines coincide is what a loss curve of a pipeline beside that of one device should show.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.drawing.axes import tick_label, ticks
from penstock.drawing.markup import coordinate, document, lines, tag, text_width, write
from penstock.units import four_digits

Point = tuple[float, float]
NamedLine = tuple[str, Sequence[tuple[float, float | None]]]

_WIDTH, _PLOT_HEIGHT, _MARGIN = 520.0, 220.0, 16.0
_LINE_HEIGHT = 22.0
_NUM_STYLES = 4
_MOST_POINTS, _MOST_MARKS = 600, 40


@dataclass(frozen=True)
class _Plane:
    """From values to pixels."""

    left: float
    right: float
    top: float
    bottom: float
    low: Point
    high: Point

    def place(self, point: Point) -> Point:
        """Where a point is drawn."""
        across = (point[0] - self.low[0]) / (self.high[0] - self.low[0])
        up = (point[1] - self.low[1]) / (self.high[1] - self.low[1])
        x = self.left + across * (self.right - self.left)
        return x, self.bottom - up * (self.bottom - self.top)


def line_chart(series: Sequence[NamedLine], x_name: str, y_name: str) -> str:
    """Draw named lines as a standalone SVG document.

    Args:
        series: (name, points); a point whose value is missing, infinite or not a number is left
            out.
        x_name: what the horizontal axis counts.
        y_name: what the vertical axis measures.
    """
    drawn = [(name, _finite(points)) for name, points in series]
    keys, top = _legend(drawn)
    plane = _plane([point for _, points in drawn for point in points], top + 26)
    height = plane.bottom + 52
    parts = [
        keys,
        write(_MARGIN, top + 12, y_name, "muted"),
        _axes(plane, x_name),
        *(_line(plane, index, points) for index, (_, points) in enumerate(drawn)),
    ]
    words = f"{y_name} by {x_name}: {', '.join(name for name, _ in series)}"
    return document("chart", (_WIDTH, height), words, "chart.css", parts)


def _finite(points: Iterable[tuple[float, float | None]]) -> list[Point]:
    return sorted((x, y) for x, y in points if y is not None and math.isfinite(y))


def _plane(points: Sequence[Point], top: float) -> _Plane:
    low, high = _bounds([y for _, y in points], 0.06)
    first, last = _bounds([x for x, _ in points], 0.0)
    labels = [tick_label(value) for value in ticks(low, high, 6)]
    left = _MARGIN + max((text_width(label, 11) for label in labels), default=0.0) + 8
    right = _WIDTH - _MARGIN - 8
    return _Plane(left, right, top, top + _PLOT_HEIGHT, (first, low), (last, high))


def _bounds(values: Sequence[float], margin: float) -> Point:
    """The lowest and highest value with some room, never the same number twice."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high > low:
        room = margin * (high - low)
        return low - room, high + room
    room = abs(low) * 0.05 or 0.5
    return low - room, high + room


def _axes(plane: _Plane, x_name: str) -> str:
    grid, axis, parts = "", f"M{plane.left:g} {plane.bottom:g}H{plane.right:g}", []
    for value in ticks(plane.low[1], plane.high[1], 6):
        _, y = plane.place((plane.low[0], value))
        grid += f"M{plane.left:g} {y:.2f}H{plane.right:g}"
        label = tick_label(value)
        parts.append(write(plane.left - 8, y + 4, label, "muted", text_anchor="end"))
    for value in ticks(plane.low[0], plane.high[0], 8):
        if value != round(value):
            continue
        x, _ = plane.place((value, plane.low[1]))
        axis += f"M{x:.2f} {plane.bottom:g}v5"
        label = tick_label(value)
        parts.append(write(x, plane.bottom + 18, label, "muted", text_anchor="middle"))
    parts.append(write(plane.left, plane.bottom + 38, x_name, "muted"))
    return lines([tag("path", class_="grid", d=grid), tag("path", class_="axis", d=axis), *parts])


def _line(plane: _Plane, index: int, points: Sequence[Point]) -> str:
    style = f"k{index % _NUM_STYLES}"
    places = [plane.place(point) for point in thinned(points)]
    path = "M" + "L".join(f"{coordinate(x)} {coordinate(y)}" for x, y in places)
    parts = [tag("path", class_=f"line {style}", d=path)] if len(places) > 1 else []
    if len(places) <= _MOST_MARKS:
        parts += [tag("circle", class_=f"point {style}", cx=x, cy=y, r=3) for x, y in places]
    return lines(parts)


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most as many points as can be told apart: of each run, the lowest and the highest."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    length = math.ceil(2 * len(points) / _MOST_POINTS)
    kept = [points[0]]
    for start in range(0, len(points), length):
        run = points[start : start + length]
        extremes = {min(run, key=lambda point: point[1]), max(run, key=lambda point: point[1])}
        kept += sorted(extremes)
    return [*kept, points[-1]]


def _legend(series: Sequence[tuple[str, list[Point]]]) -> tuple[str, float]:
    """The keys with each line's last value, and where they end."""
    x, y, parts = _MARGIN, 10.0, []
    for index, (name, points) in enumerate(series):
        words = f"{name}, last {four_digits(points[-1][1])}" if points else f"{name}, no values"
        needed = 34 + text_width(words, 12) + 14
        if x > _MARGIN and x + needed > _WIDTH - _MARGIN:
            x, y = _MARGIN, y + _LINE_HEIGHT
        key = tag("path", class_=f"line k{index % _NUM_STYLES}", d=f"M{x:.2f} {y + 7:g}h28")
        parts += [key, write(x + 34, y + 12, words)]
        x += needed
    return lines(parts), y + _LINE_HEIGHT
