"""Memory over time: a panel per rank, a line per timeline, and the limit that none may cross.

Memory comes and goes in steps, so lines do. Later lines are dashed, so that what is as predicted
shows both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

from penstock.base.units import picture_bytes, unit_of_seconds
from penstock.core.schedule.memory import Curve
from penstock.drawing.axes import tick_label, ticks
from penstock.drawing.markup import coordinate, document, lines, tag, text_width, write

_WIDTH, _PANEL_HEIGHT, _GAP, _MARGIN = 760.0, 96.0, 26.0, 16.0
_TOP, _NUM_STYLES, _ROOM = 40.0, 4, 1.12


@dataclass(frozen=True)
class _Panel:
    """Where the memory of one rank is drawn: from seconds and bytes to pixels."""

    left: float
    top: float
    extent: float
    most: float

    def x(self, time: float) -> float:
        """Of a moment."""
        return self.left + time / self.extent * (_WIDTH - _MARGIN - self.left)

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
        _Panel(left, _TOP + 18 + rank * (_PANEL_HEIGHT + _GAP), extent, most or 1.0)
        for rank in range(len(limits))
    ]
    parts = [_legend(list(curves), any(limit is not None for limit in limits))]
    for rank, (panel, limit) in enumerate(zip(panels, limits, strict=True)):
        parts.append(_frame(panel, rank, limit))
        parts += [
            _steps(panel, each[rank], f"k{index % _NUM_STYLES}")
            for index, each in enumerate(curves.values())
        ]
    bottom = panels[-1].top + _PANEL_HEIGHT if panels else _TOP
    parts.append(_time_axis(panels[-1], bottom) if panels else "")
    words = f"memory of {len(limits)} ranks over time: {', '.join(curves)}"
    return document("chart", (_WIDTH, bottom + 52), words, "chart.css", parts)


def _byte_ticks(most: float) -> list[float]:
    """Round numbers of the unit in which sizes are written."""
    size = 1024.0 ** int(log(most, 1024)) if most > 1 else 1.0
    return [value * size for value in ticks(0.0, most / size, 3)]


def _steps(panel: _Panel, curve: Curve, style: str) -> str:
    path = ""
    for index, (time, held) in enumerate(curve):
        x, y = coordinate(panel.x(time)), coordinate(panel.y(held))
        path += f"H{x}V{y}" if index else f"M{x} {y}"
    return tag("path", class_=f"line {style}", d=path) if len(curve) > 1 else ""


def _frame(panel: _Panel, rank: int, limit: float | None) -> str:
    right, grid, parts = _WIDTH - _MARGIN, "", []
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


def _time_axis(panel: _Panel, bottom: float) -> str:
    unit = unit_of_seconds(panel.extent)
    axis, parts = f"M{panel.left:g} {bottom:g}H{_WIDTH - _MARGIN:g}", []
    for value in ticks(0.0, panel.extent * unit.factor, 8):
        x = panel.x(value / unit.factor)
        axis += f"M{coordinate(x)} {bottom:g}v5"
        parts.append(write(x, bottom + 18, tick_label(value), "muted", text_anchor="middle"))
    parts.append(write(panel.left, bottom + 38, f"time in {unit.suffix}", "muted"))
    return lines([tag("path", class_="axis", d=axis), *parts])


def _legend(names: Sequence[str], has_limits: bool) -> str:
    x, parts = _MARGIN, []
    for index, name in enumerate(names):
        parts.append(tag("path", class_=f"line k{index % _NUM_STYLES}", d=f"M{x:.2f} 18h28"))
        parts.append(write(x + 34, 22, name))
        x += 34 + text_width(name, 12) + 18
    if has_limits:
        parts.append(tag("path", class_="limit", d=f"M{x:.2f} 18h28"))
        parts.append(write(x + 34, 22, "limit"))
    return lines(parts)
