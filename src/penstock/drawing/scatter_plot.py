"""The common part of pictures with points: two axes, and labels that cover neither points nor each
other.

Axes are logarithmic where values differ much, so that neither corner is a heap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.drawing.markup import lines, tag, tick_label, ticks, write

_MUCH = 4.0
"""How many times as large the largest value is as the smallest on a logarithmic axis."""


class PlotBox(NamedTuple):
    """A rectangle, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: PlotBox) -> float:
        """The area that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(width, 0.0) * max(height, 0.0)

    @classmethod
    def around(cls, place: tuple[float, float], radius: float) -> PlotBox:
        """The box of a point, with a pixel more on each side."""
        x, y = place
        return cls(x - radius - 1, y - radius - 1, x + radius + 1, y + radius + 1)


@dataclass(frozen=True)
class ScatterAxis:
    """From values to pixels, from ``begin`` to ``end``.

    Attributes:
        title: what is shown.
        values: all of them, at least one.
        begin, end: pixels.
        is_whole: whether only whole numbers make sense.
        is_linear: whether equal lengths are equal differences, however much values differ.
        from_zero: whether a linear axis begins there; else shortly before the least value.
        show: a value as a tick's label.
    """

    title: str
    values: Sequence[float]
    begin: float
    end: float
    is_whole: bool = False
    is_linear: bool = False
    from_zero: bool = True
    show: Callable[[float], str] = tick_label

    @property
    def is_logarithmic(self) -> bool:
        """Whether equal lengths are equal factors."""
        least, most = min(self.values), max(self.values)
        return not self.is_linear and least > 0 and most > _MUCH * least

    @property
    def _range(self) -> tuple[float, float]:
        least, most = min(self.values), max(self.values)
        if self.is_logarithmic:
            return least / 1.25, most * 1.25
        if not self.from_zero:
            room = max(most - least, most / 4) or 1.0
            return max(0.0, least - room), most + room
        return 0.0, most * 1.12 or 1.0

    def place(self, value: float) -> float:
        """Where a value is, to a hundredth of a pixel."""
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

    @property
    def words(self) -> str:
        """The title, and what is unusual of the axis."""
        return self.title + (", logarithmic" if self.is_logarithmic else "")


def drawn_axes(frame: PlotBox, across: ScatterAxis, up: ScatterAxis) -> Iterator[str]:
    """The two axes of a picture, with their ticks and titles.

    Args:
        frame: in which points lie.
    """
    grid, axis, labels = "", f"M{frame.left:g} {frame.bottom:g}H{frame.right:g}", []
    for value in up.ticks():
        y = up.place(value)
        grid += f"M{frame.left:g} {y:g}H{frame.right:g}"
        labels.append(write(frame.left - 8, y + 4, up.show(value), "muted", text_anchor="end"))
    for value in across.ticks():
        x = across.place(value)
        axis += f"M{x:g} {frame.bottom:g}v5"
        labels.append(
            write(x, frame.bottom + 19, across.show(value), "muted", text_anchor="middle")
        )
    yield tag("path", class_="grid", d=grid)
    yield tag("path", class_="axis", d=axis)
    yield lines(labels)
    yield write(8, frame.top - 16, up.words, "muted")
    yield write(frame.right, frame.bottom + 42, across.words, "muted", text_anchor="end")


# Beside the point, above, below; then further away.
_DIRECTIONS = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (1, 1), (-1, -1), (-1, 1))


class LabelPlaces:
    """Places for labels beside points, each where it covers least of what is there.

    Args:
        frame: which labels should not leave.
        taken: where points and lines are.
        distances: from a point to its label, nearest first.
    """

    def __init__(
        self, frame: PlotBox, taken: Iterable[PlotBox], distances: Sequence[float]
    ) -> None:
        self._frame, self._taken, self._distances = frame, [*taken], distances

    def take(self, place: tuple[float, float], width: float, height: float) -> PlotBox:
        """The place for a label of some size beside a point."""
        boxes = (
            _beside(place, direction, distance, width, height)
            for distance in self._distances
            for direction in _DIRECTIONS
        )
        best = min(boxes, key=self._covered)
        self._taken.append(best)
        return best

    def _covered(self, box: PlotBox) -> float:
        outside = box.overlap(box) - box.overlap(self._frame)
        return sum(box.overlap(other) for other in self._taken) + 10 * outside


def _beside(
    place: tuple[float, float],
    direction: tuple[int, int],
    distance: float,
    width: float,
    height: float,
) -> PlotBox:
    across, up = direction
    share = math.sqrt(0.5) if across and up else 1.0
    x = place[0] + across * distance * share + (across - 1) * width / 2
    y = place[1] + up * distance * share + (up - 1) * height / 2
    return PlotBox(x, y, x + width, y + height)
