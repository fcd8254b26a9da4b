"""Step time against something else that a plan takes: a numbered dot for each plan, and a line
through those that no other one beats in both.

Both axes are logarithmic where values differ much, so that neither corner is a heap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.base.units import count_of
from penstock.drawing.markup import (
    coordinate,
    document,
    lines,
    tag,
    text_width,
    tick_label,
    ticks,
    write,
)

_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 22.0, 34.0, 52.0
_RADIUS, _SIZE = 6.0, 12.0
_MUCH = 4.0
"""How many times as large the largest value is as the smallest on a logarithmic axis."""


class NumberedDot(NamedTuple):
    """A plan in the picture.

    Attributes:
        number: by which the page knows it.
        across, up: its values on the axes.
        words: what is said of it under the pointer.
        style: a class of the style sheet.
    """

    number: int
    across: float
    up: float
    words: str
    style: str


@dataclass(frozen=True)
class ScatterAxis:
    """From values to pixels, from ``begin`` to ``end``.

    Attributes:
        title: what is shown.
        values: all of them.
        begin, end: pixels.
        is_whole: whether only whole numbers make sense.
        show: a value as a tick's label.
    """

    title: str
    values: Sequence[float]
    begin: float
    end: float
    is_whole: bool = False
    show: Callable[[float], str] = tick_label

    @property
    def is_logarithmic(self) -> bool:
        """Whether equal lengths are equal factors."""
        return min(self.values) > 0 and max(self.values) > _MUCH * min(self.values)

    @property
    def _range(self) -> tuple[float, float]:
        least, most = min(self.values), max(self.values)
        if self.is_logarithmic:
            return least / 1.25, most * 1.25
        return 0.0, most * 1.12 or 1.0

    def place(self, value: float) -> float:
        """Where a value is."""
        low, high = self._range
        if self.is_logarithmic:
            share = math.log(max(value, low) / low) / math.log(high / low)
        else:
            share = (value - low) / (high - low)
        return round(self.begin + share * (self.end - self.begin), 2)

    def ticks(self) -> list[float]:
        """Round values, not nearer to each other than their labels are wide."""
        low, high = self._range
        room = max(2, int(abs(self.end - self.begin) / 64))
        if not self.is_logarithmic:
            return [t for t in ticks(low, high, room) if not self.is_whole or t == int(t)]
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        values = [m * 10.0**p for p in powers for m in (1, 2, 5)]
        if self.is_whole:
            values = [2.0**p for p in range(math.ceil(math.log2(high)) + 1)]
        shown = [value for value in values if low <= value <= high]
        return shown[:: -(-len(shown) // room)] if shown else []


def choice_scatter(
    dots: Sequence[NumberedDot],
    efficient: Collection[int],
    across: Callable[[float, float], ScatterAxis],
    up: Callable[[float, float], ScatterAxis],
    width: float,
) -> str:
    """Draw dots as a standalone SVG document.

    Args:
        efficient: the numbers of those that a line joins.
        across, up: make an axis between two pixels.
        width: of the picture; its height follows.
    """
    height = round(min(440.0, 0.8 * width + 60))
    x_axis = across(_LEFT, width - _RIGHT)
    y_axis = up(height - _BOTTOM, _TOP)
    places = {dot.number: (x_axis.place(dot.across), y_axis.place(dot.up)) for dot in dots}
    line = sorted(places[number] for number in efficient)
    front = "M" + "L".join(f"{coordinate(x)} {coordinate(y)}" for x, y in line)
    # What can't be had is drawn first, so that it hides nothing.
    ordered = sorted(dots, key=lambda dot: (dot.style == "chosen", dot.style != "absent"))
    parts = [
        *_axes(x_axis, y_axis, width, height),
        tag("path", class_="front", d=front) if len(line) > 1 else "",
        *(_dot(dot, places[dot.number]) for dot in ordered),
        *_numbers(dots, places, (width, height)),
    ]
    words = f"{y_axis.title} against {x_axis.title} of {count_of(len(dots), 'plan')}"
    return document("chart choice", (width, height), words, "choice_chart.css", parts)


def _dot(dot: NumberedDot, place: tuple[float, float]) -> str:
    x, y = place
    circle = tag("circle", tag("title", dot.words), class_=dot.style, cx=x, cy=y, r=_RADIUS)
    return tag("a", circle, href=f"#plan-{dot.number}", aria_label=dot.words)


def _numbers(
    dots: Sequence[NumberedDot],
    places: dict[int, tuple[float, float]],
    size: tuple[float, float],
) -> Iterator[str]:
    """The number of each dot beside it, where it covers no dot and no other number."""
    taken = [(x, y, _RADIUS + 1, _RADIUS + 1) for x, y in places.values()]
    for dot in dots:
        x, y = places[dot.number]
        half = text_width(str(dot.number), _SIZE) / 2 + 1
        boxes = [
            (x + dx * (_RADIUS + half + 2) * far, y + dy * (_RADIUS + 8) * far, half, 7.0)
            for far in (1.0, 1.7, 2.5)
            for dx, dy in ((1, 0), (0, -1), (-1, 0), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1))
        ]
        inside = [
            box
            for box in boxes
            if box[0] - half > _LEFT and box[0] + half < size[0] and box[1] < size[1] - _BOTTOM
        ]
        best = min(inside or boxes, key=lambda box: _covered(box, taken))
        taken.append(best)
        yield write(best[0], best[1] + 4, str(dot.number), "name", text_anchor="middle")


Box = tuple[float, float, float, float]
"""The middle of a rectangle, and half of its width and height."""


def _covered(box: Box, taken: Iterable[Box]) -> float:
    """The area that a box shares with others."""
    area = 0.0
    for x, y, half_width, half_height in taken:
        wide = half_width + box[2] - abs(x - box[0])
        high = half_height + box[3] - abs(y - box[1])
        area += max(wide, 0.0) * max(high, 0.0)
    return area


def _axes(across: ScatterAxis, up: ScatterAxis, width: float, height: float) -> Iterator[str]:
    bottom, right = height - _BOTTOM, width - _RIGHT
    grid, axis, labels = "", f"M{_LEFT:g} {bottom:g}H{right:g}", []
    for value in up.ticks():
        y = up.place(value)
        grid += f"M{_LEFT:g} {y:g}H{right:g}"
        labels.append(write(_LEFT - 8, y + 4, up.show(value), "muted", text_anchor="end"))
    for value in across.ticks():
        x = across.place(value)
        axis += f"M{x:g} {bottom:g}v5"
        labels.append(write(x, bottom + 19, across.show(value), "muted", text_anchor="middle"))
    marks = {True: ", logarithmic", False: ""}
    yield tag("path", class_="grid", d=grid)
    yield tag("path", class_="axis", d=axis)
    yield lines(labels)
    yield write(8, 18, up.title + marks[up.is_logarithmic], "muted")
    words = across.title + marks[across.is_logarithmic]
    yield write(right, height - 10, words, "muted", text_anchor="end")
