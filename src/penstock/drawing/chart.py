"""Line charts: losses over steps, and memory over time with the limit that no rank may cross.

Later lines are dashed, so that lines that lie on each other all stay visible: that two coincide is
what a loss curve of a pipeline beside that of one device should show, and memory as predicted.
Memory comes and goes in steps, so its lines do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log

from penstock.base.units import four_digits, picture_bytes, unit_of_seconds
from penstock.core.schedule.memory import Curve
from penstock.drawing.markup import (
    coordinate,
    document,
    escaped,
    lines,
    shortened,
    tag,
    text_width,
    tick_label,
    ticks,
    write,
)

Point = tuple[float, float]
NamedLine = tuple[str, Sequence[tuple[float, float | None]]]

_WIDTH, _PLOT_HEIGHT, _MARGIN = 520.0, 220.0, 16.0
_LINE_HEIGHT = 22.0
_NUM_STYLES = 4
_MOST_POINTS, _MOST_MARKS = 600, 40
MOST_LINES = 6
"""More than these cannot be told apart in one chart."""
_COLUMNS, _SMALL_HEIGHT, _HEAD, _FOOT = 3, 92.0, 26.0, 16.0


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
    """Draw named lines as a standalone SVG document; more than six in a small chart each, over all
    others in grey.

    Args:
        series: (name, points); a point whose value is missing, infinite or not a number is left
            out.
        x_name: what the horizontal axis counts.
        y_name: what the vertical axis measures.
    """
    drawn = [(name, _finite(points)) for name, points in series]
    if len(drawn) > MOST_LINES:
        return _multiples(drawn, x_name, y_name)
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


def _multiples(drawn: Sequence[tuple[str, list[Point]]], x_name: str, y_name: str) -> str:
    low, high = _bounds([y for _, points in drawn for _, y in points], 0.06)
    first, last = _bounds([x for _, points in drawn for x, _ in points], 0.0)
    marks = ticks(low, high, 3)
    left = _MARGIN + max(text_width(tick_label(value), 11) for value in marks) + 8
    step = (_WIDTH - _MARGIN - left) / _COLUMNS
    parts, bottom = [write(_MARGIN, _MARGIN + 6, f"{y_name} by {x_name}", "muted")], 0.0
    for index, (name, points) in enumerate(drawn):
        row, column = divmod(index, _COLUMNS)
        top = _MARGIN + 14 + row * (_SMALL_HEIGHT + _HEAD + _FOOT) + _HEAD
        x = left + column * step
        bottom = top + _SMALL_HEIGHT
        plane = _Plane(x, x + step - 12, top, bottom, (first, low), (last, high))
        others = [line for other, line in drawn if other != name]
        parts.append(_small(plane, name, points, others, marks if column == 0 else []))
    words = f"{y_name} by {x_name}: {', '.join(name for name, _ in drawn)}"
    size = _WIDTH, bottom + _FOOT + _MARGIN
    return document("chart", size, words, "chart.css", parts)


def _small(
    plane: _Plane,
    name: str,
    points: Sequence[Point],
    others: Iterable[Sequence[Point]],
    labelled: Sequence[float],
) -> str:
    """One line of many, with its name above."""
    words = f"{name}, last {four_digits(points[-1][1])}" if points else f"{name}, no values"
    width = plane.right - plane.left
    shown = words if text_width(words, 12) <= width else shortened(name, 12, width)
    parts = [tag("title", escaped(words)), write(plane.left, plane.top - 6, shown)]
    axis = f"M{coordinate(plane.left)} {coordinate(plane.bottom)}H{coordinate(plane.right)}"
    parts += [tag("path", class_="grid", d=_path(plane, other)) for other in others if other]
    parts.append(tag("path", class_="axis", d=axis))
    for value in labelled:
        _, y = plane.place((plane.low[0], value))
        label = tick_label(value)
        parts.append(write(plane.left - 8, y + 4, label, "muted", text_anchor="end"))
    ends = ((plane.low[0], plane.left, "start"), (plane.high[0], plane.right, "end"))
    parts += [
        write(x, plane.bottom + 14, tick_label(round(value, 6)), "muted", text_anchor=anchor)
        for value, x, anchor in ends
    ]
    if points:
        parts.append(tag("path", class_="line k0", d=_path(plane, points)))
    return tag("g", lines(parts))


def _path(plane: _Plane, points: Sequence[Point]) -> str:
    places = (plane.place(point) for point in thinned(points))
    return "M" + "L".join(f"{coordinate(x)} {coordinate(y)}" for x, y in places)


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
    path = tag("path", class_=f"line {style}", d=_path(plane, points)) if len(places) > 1 else ""
    parts = [path]
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


_MEMORY_WIDTH, _PANEL_HEIGHT, _GAP = 760.0, 96.0, 26.0
_TOP, _ROOM = 40.0, 1.12


@dataclass(frozen=True)
class _MemoryPanel:
    """Where the memory of one rank is drawn: from seconds and bytes to pixels."""

    left: float
    top: float
    extent: float
    most: float

    def x(self, time: float) -> float:
        """Of a moment."""
        return self.left + time / self.extent * (_MEMORY_WIDTH - _MARGIN - self.left)

    def y(self, num_bytes: float) -> float:
        """Of an amount."""
        return self.top + _PANEL_HEIGHT * (1 - num_bytes / self.most)


def memory_chart(curves: Mapping[str, Sequence[Curve]], limits: Sequence[float | None]) -> str:
    """Draw what ranks hold over time as a standalone SVG document.

    Args:
        curves: by name, one per rank: (seconds, bytes held from then on).
        limits: bytes that each rank may hold; ``None`` where there is no limit.
    """
    points = [point for each in curves.values() for curve in each for point in curve]
    extent = max((time for time, _ in points), default=0.0) or 1.0
    most = _ROOM * max([0.0, *(held for _, held in points), *(limit or 0 for limit in limits)])
    labels = [picture_bytes(value) for value in _byte_ticks(most or 1.0)]
    left = _MARGIN + max(text_width(label, 11) for label in labels) + 10
    panels = [
        _MemoryPanel(left, _TOP + 18 + rank * (_PANEL_HEIGHT + _GAP), extent, most or 1.0)
        for rank in range(len(limits))
    ]
    parts = [_memory_legend(list(curves), any(limit is not None for limit in limits))]
    for rank, (panel, limit) in enumerate(zip(panels, limits, strict=True)):
        parts.append(_frame(panel, rank, limit))
        parts += [
            _steps(panel, each[rank], f"k{index % _NUM_STYLES}")
            for index, each in enumerate(curves.values())
        ]
    bottom = panels[-1].top + _PANEL_HEIGHT if panels else _TOP
    parts.append(_time_axis(panels[-1], bottom) if panels else "")
    words = f"memory of {len(limits)} ranks over time: {', '.join(curves)}"
    return document("chart", (_MEMORY_WIDTH, bottom + 52), words, "chart.css", parts)


def _byte_ticks(most: float) -> list[float]:
    """Round numbers of the unit in which sizes are written."""
    size = 1024.0 ** int(log(most, 1024)) if most > 1 else 1.0
    return [value * size for value in ticks(0.0, most / size, 3)]


def _steps(panel: _MemoryPanel, curve: Curve, style: str) -> str:
    path = ""
    for index, (time, held) in enumerate(curve):
        x, y = coordinate(panel.x(time)), coordinate(panel.y(held))
        path += f"H{x}V{y}" if index else f"M{x} {y}"
    return tag("path", class_=f"line {style}", d=path) if len(curve) > 1 else ""


def _frame(panel: _MemoryPanel, rank: int, limit: float | None) -> str:
    right, grid, parts = _MEMORY_WIDTH - _MARGIN, "", []
    for value in _byte_ticks(panel.most):
        grid += f"M{panel.left:g} {coordinate(panel.y(value))}H{right:g}"
        label = picture_bytes(value)
        parts.append(write(panel.left - 8, panel.y(value) + 4, label, "muted", text_anchor="end"))
    parts.append(write(panel.left, panel.top - 6, f"rank {rank}", "muted"))
    if limit is not None:
        y = panel.y(limit)
        line = f"M{panel.left:g} {coordinate(y)}H{right:g}"
        parts.append(tag("path", class_="limit", d=line))
        words = f"limit {picture_bytes(limit)}"
        parts.append(write(right, y - 4, words, "muted", text_anchor="end"))
    return lines([tag("path", class_="grid", d=grid), *parts])


def _time_axis(panel: _MemoryPanel, bottom: float) -> str:
    unit = unit_of_seconds(panel.extent)
    axis, parts = f"M{panel.left:g} {bottom:g}H{_MEMORY_WIDTH - _MARGIN:g}", []
    for value in ticks(0.0, panel.extent * unit.factor, 8):
        x = panel.x(value / unit.factor)
        axis += f"M{coordinate(x)} {bottom:g}v5"
        parts.append(write(x, bottom + 18, tick_label(value), "muted", text_anchor="middle"))
    parts.append(write(panel.left, bottom + 38, f"time in {unit.suffix}", "muted"))
    return lines([tag("path", class_="axis", d=axis), *parts])


def _memory_legend(names: Sequence[str], has_limits: bool) -> str:
    x, parts = _MARGIN, []
    for index, name in enumerate(names):
        parts.append(tag("path", class_=f"line k{index % _NUM_STYLES}", d=f"M{x:.2f} 18h28"))
        parts.append(write(x + 34, 22, name))
        x += 34 + text_width(name, 12) + 18
    if has_limits:
        parts.append(tag("path", class_="limit", d=f"M{x:.2f} 18h28"))
        parts.append(write(x + 34, 22, "limit"))
    return lines(parts)
