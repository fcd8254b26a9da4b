"""Draws what ``benchmarks/learning/convergence.py`` found: held-out loss by updates and by time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from penstock.drawing.markup import document, lines, tag, text_width, tick_label, ticks, write

Point = tuple[float, float]

WIDTH, PLOT_HEIGHT, MARGIN, LEFT = 760.0, 260.0, 16.0, 62.0
LEGEND_WIDTH, LEGEND_LINE = 196.0, 19.0
PANEL_TOP, PANEL_BOTTOM = 34.0, 52.0

_FAMILIES = {"s": "ink", "v": "line0", "p": "line1", "m": "line2", "o": "line3"}
_DASHES = ("none", "7 4", "2 3", "9 3 2 3")
_LIGHT = {"ink": "#1c2127", "line0": "#0067a8", "line1": "#c2500f", "line2": "#00805c"}
_LIGHT["line3"] = "#8d4a9e"

DRAWN = {
    "1F1B": "s0",
    "1F1B, RotatedAdam": "s1",
    "stash": "v0",
    "vertical sync": "v1",
    "2BW": "v2",
    "latest": "v3",
    "PipeOptim": "p0",
    "SpecTrain": "p1",
    "PipeMare T1": "m1",
    "PipeMare T1+T2+T3": "m0",
    "stash, RotatedAdam": "o0",
    "stash, NAdamW": "o1",
}
"""The methods in the pictures: a colour for an idea, a dash for one of its kinds. In tables are
more."""


class Curve(NamedTuple):
    """One method's means over seeds.

    Attributes:
        name: of the method.
        updates: at each look.
        times: the same, in simulated updates of one device.
        losses: held out.
    """

    name: str
    updates: Sequence[float]
    times: Sequence[float]
    losses: Sequence[float]


class _Scale(NamedTuple):
    """From values to pixels along one axis."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Where a value is drawn."""
        low, high = self._bent(self.low), self._bent(self.high)
        part = (self._bent(value) - low) / (high - low)
        return self.start + part * (self.end - self.start)

    def _bent(self, value: float) -> float:
        return math.log(value) if self.logarithmic else value

    def ticks(self) -> list[float]:
        """Round values."""
        if not self.logarithmic:
            return ticks(self.low, self.high, 6)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = [round(k * 10.0**power, 9) for power in powers for k in (1, 2, 5)]
        return [value for value in found if self.low <= value <= self.high]


def picture(title: str, curves: Sequence[Curve], unit: str, *, logarithmic: bool) -> str:
    """Two panels, by updates and by time, and a legend in the order of the last losses.

    Args:
        title: above both.
        curves: of the methods in ``DRAWN``.
        unit: of the loss.
        logarithmic: whether the axis of losses is.
    """
    ordered = sorted((one for one in curves if one.name in DRAWN), key=lambda one: one.losses[-1])
    low, high = _bounds([loss for one in ordered for loss in one.losses[2:]], logarithmic)
    panel = PANEL_TOP + PLOT_HEIGHT + PANEL_BOTTOM
    parts = [write(MARGIN, 26, title, font_weight="600"), _legend(ordered, 30 + PANEL_TOP)]
    for number, (x_name, across) in enumerate(
        (("updates", "updates"), ("simulated time, in updates of one device", "times"))
    ):
        top = 30 + number * panel + PANEL_TOP
        most = max(getattr(one, across)[-1] for one in ordered)
        x = _Scale(0, most, LEFT, WIDTH - LEGEND_WIDTH - MARGIN)
        y = _Scale(low, high, top + PLOT_HEIGHT, top, logarithmic)
        parts.append(write(MARGIN, top - 12, f"held-out loss, {unit}", "muted"))
        parts.append(_axes(x, y, x_name))
        drawn = [_line(x, y, getattr(one, across), one) for one in reversed(ordered)]
        parts.append(_window(x, y, drawn))
    words = f"{title}: {', '.join(one.name for one in ordered)}"
    size = (WIDTH, 30 + 2 * panel)
    return document("chart", size, words, "chart.css", parts, _style())


def _bounds(losses: Sequence[float], logarithmic: bool) -> Point:
    """Without the first two looks, which are high and alike, so that ends can be told apart."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    low, high = min(finite), max(finite)
    if logarithmic:
        return low * 0.9, high * 1.1
    return low - 0.06 * (high - low), high + 0.06 * (high - low)


def _window(x: _Scale, y: _Scale, parts: Sequence[str]) -> str:
    """Cuts off at the top what is higher; the circles at the ends stay whole."""
    room = 4.0
    left, top = x.start - room, y.end
    width, height = x.end - x.start + 2 * room, y.start - y.end + room
    view = f"{left:g} {top:g} {width:g} {height:g}"
    size = {"x": left, "y": top, "width": width, "height": height}
    return tag("svg", lines(parts), viewBox=view, **size)


def _style() -> str:
    rules = [".chart .curve{fill:none;stroke-width:1.8;stroke-linejoin:round}"]
    for letter, colour in _FAMILIES.items():
        rules.append(f".chart .{letter}{{stroke:{_LIGHT[colour]};stroke:var(--{colour})}}")
    rules += [f".chart .d{n}{{stroke-dasharray:{dash}}}" for n, dash in enumerate(_DASHES)]
    rules.append(".chart .end{stroke:none}")
    for letter, colour in _FAMILIES.items():
        rules.append(f".chart .end.{letter}{{stroke:none;fill:{_LIGHT[colour]};")
        rules[-1] += f"fill:var(--{colour})}}"
    return tag("style", "\n" + "\n".join(rules) + "\n")


def _classes(name: str) -> str:
    style = DRAWN[name]
    return f"{style[0]} d{style[1]}"


def _line(x: _Scale, y: _Scale, across: Sequence[float], curve: Curve) -> str:
    points = [
        (x.at(place), y.at(loss))
        for place, loss in zip(across, curve.losses, strict=True)
        if math.isfinite(loss)
    ]
    path = "M" + "L".join(f"{left:.2f} {up:.2f}" for left, up in points)
    last = points[-1]
    return lines(
        [
            tag("path", class_=f"curve {_classes(curve.name)}", d=path),
            tag("circle", class_=f"end {DRAWN[curve.name][0]}", cx=last[0], cy=last[1], r=3),
        ]
    )


def _axes(x: _Scale, y: _Scale, x_name: str) -> str:
    grid, axis, parts = "", f"M{x.start:g} {y.start:g}H{x.end:g}", []
    for value in y.ticks():
        at = y.at(value)
        grid += f"M{x.start:g} {at:.2f}H{x.end:g}"
        parts.append(write(x.start - 8, at + 4, tick_label(value), "muted", text_anchor="end"))
    for value in x.ticks():
        at = x.at(value)
        axis += f"M{at:.2f} {y.start:g}v5"
        label = tick_label(value)
        parts.append(write(at, y.start + 18, label, "muted", text_anchor="middle"))
    parts.append(write(x.start, y.start + 38, x_name, "muted"))
    return lines([tag("path", class_="grid", d=grid), tag("path", class_="axis", d=axis), *parts])


def _legend(curves: Sequence[Curve], top: float) -> str:
    left, parts = WIDTH - LEGEND_WIDTH, []
    parts.append(write(left, top - 12, "last loss, lowest first", "muted"))
    for number, one in enumerate(curves):
        y = top + 4 + number * LEGEND_LINE
        d = f"M{left:g} {y:g}h26"
        parts.append(tag("path", class_=f"curve {_classes(one.name)}", d=d))
        words = one.name.replace("PipeMare T1+T2+T3", "PipeMare T1–T3")
        assert text_width(words, 12) < LEGEND_WIDTH - 32 - MARGIN
        parts.append(write(left + 32, y + 4, words))
    return lines(parts)
