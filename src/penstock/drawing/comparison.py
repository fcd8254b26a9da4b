"""Schedules beside each other: their numbers in a table, and memory against bubble in a figure,
which is what a choice between schedules weighs.

The figure has a point per schedule and both bubbles: a filled mark for the makespan bubble and,
where the stage bubble is another, a hollow one joined to it. Every point bears its name; names move
out of each other's way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.base.arguments import public
from penstock.base.errors import InputError
from penstock.base.values import expect
from penstock.core.schedule.schedule import Schedule
from penstock.core.timing.costs import Costs
from penstock.core.timing.simulator import Foretold, is_foretold, simulate
from penstock.core.timing.timeline import Timeline
from penstock.drawing.markup import (
    Titled,
    coordinate,
    document,
    lines,
    tag,
    text_width,
    tick_label,
    ticks,
    title_of,
    unit_for,
    write,
)

_WIDTH, _HEIGHT, _MARGIN = 760.0, 500.0, 16.0
_TOP, _BOTTOM, _LEFT = 54.0, 54.0, 62.0
_RADIUS, _SIZE, _LINE_HEIGHT = 5.0, 12.0, 15.0
_NEAR = 4.0


class ScatterMark(NamedTuple):
    """A schedule in the picture: its peak of activations and its two bubbles."""

    name: str
    memory: float
    bubble: float
    stage_bubble: float


def scatter_timelines(timelines: Sequence[Titled]) -> str:
    """Draw the peak of activations of each timeline against its bubbles."""
    return scatter(
        [
            ScatterMark(
                title, max(drawn.peak_activations, default=0.0), drawn.bubble, drawn.stage_bubble
            )
            for title, drawn in timelines
        ]
    )


def scatter(marks: Sequence[ScatterMark]) -> str:
    """Draw marks as a standalone SVG document."""
    plane = _MemoryPlane(marks)
    labels = _Labels(plane, marks)
    named: dict[tuple[float, float], list[ScatterMark]] = {}
    for mark in marks:
        named.setdefault(plane.place(mark.memory, mark.bubble), []).append(mark)
    for place, group in sorted(named.items()):
        labels.add(place, [mark.name for mark in group])
        _name_hollow(plane, labels, group)
    parts = [
        _legend(marks),
        _axes(plane),
        *(_join(plane, mark) for mark in marks),
        *labels.drawn,
        *(tag("circle", class_="dot", cx=x, cy=y, r=_RADIUS) for x, y in named),
    ]
    words = f"peak activations against bubble: {', '.join(mark.name for mark in marks)}"
    return document("chart", (_WIDTH, _HEIGHT), words, "chart.css", parts)


def _differs(mark: ScatterMark) -> bool:
    return abs(mark.bubble - mark.stage_bubble) > 1e-9


def _name_hollow(plane: _MemoryPlane, labels: _Labels, group: Sequence[ScatterMark]) -> None:
    """Where some of the schedules of one point have another stage bubble, say which."""
    lower: dict[tuple[float, float], list[str]] = {}
    for mark in filter(_differs, group):
        lower.setdefault(plane.place(mark.memory, mark.stage_bubble), []).append(mark.name)
    for place, names in sorted(lower.items()):
        if len(names) < len(group):
            labels.add(place, names)


class _MemoryPlane:
    """From values to pixels: memory in powers of two across, bubbles upwards from 0."""

    def __init__(self, marks: Sequence[ScatterMark]) -> None:
        memory = [math.log2(max(mark.memory, 1e-9)) for mark in marks] or [0.0]
        self.low, self.high = min(memory) - 0.35, max(memory) + 0.35
        self.top = max((mark.bubble for mark in marks), default=0.0) * 1.1 or 1.0

    def place(self, memory: float, bubble: float) -> tuple[float, float]:
        """Where a value is drawn, to a hundredth of a pixel."""
        across = (math.log2(max(memory, 1e-9)) - self.low) / (self.high - self.low)
        x = _LEFT + across * (_WIDTH - _MARGIN - _LEFT)
        y = _HEIGHT - _BOTTOM - max(bubble, 0.0) / self.top * (_HEIGHT - _BOTTOM - _TOP)
        return round(x, 2), round(y, 2)

    def memory_ticks(self) -> list[float]:
        """Powers of two and what lies half-way between them."""
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        values = [share * 2.0**power for power in powers for share in (1, 1.5)]
        return [value for value in values if self.low <= math.log2(value) <= self.high]


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: _Box) -> float:
        """The area that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(width, 0.0) * max(height, 0.0)

    def outside(self) -> float:
        """By how much it leaves the plot."""
        room = _Box(_LEFT, _TOP, _WIDTH - _MARGIN / 2, _HEIGHT - _BOTTOM)
        area = (self.right - self.left) * (self.bottom - self.top)
        return area - self.overlap(room)


# Beside the mark, above, below; then further away, at the end of a line.
_DIRECTIONS = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (1, 1), (-1, -1), (-1, 1))
_DISTANCES = (_NEAR + _RADIUS, 22.0, 36.0, 54.0)


@dataclass
class _Labels:
    """Names beside their marks, each where it covers no other and no mark."""

    plane: _MemoryPlane
    marks: Sequence[ScatterMark]
    drawn: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._taken = list(self._obstacles())

    def _obstacles(self) -> Iterable[_Box]:
        for mark in self.marks:
            x, high = self.plane.place(mark.memory, mark.bubble)
            _, low = self.plane.place(mark.memory, mark.stage_bubble)
            yield _Box(x - _RADIUS - 1, high - _RADIUS - 1, x + _RADIUS + 1, high + _RADIUS + 1)
            if _differs(mark):
                yield _Box(x - _RADIUS - 1, low - _RADIUS - 1, x + _RADIUS + 1, low + _RADIUS + 1)
                yield _Box(x - 2, high, x + 2, low)

    def add(self, place: tuple[float, float], names: Sequence[str]) -> None:
        """Write names, a line each, beside ``place``."""
        width = max(text_width(name, _SIZE) for name in names)
        height = _LINE_HEIGHT * len(names)
        choices = [
            (distance, _beside(place, direction, distance, width, height))
            for distance in _DISTANCES
            for direction in _DIRECTIONS
        ]
        distance, box = min(choices, key=lambda choice: self._covered(choice[1]))
        self._taken.append(box)
        x, y = place
        if distance > _DISTANCES[0]:
            end_x = min(max(x, box.left), box.right)
            end_y = min(max(y, box.top + 4), box.bottom - 4)
            path = f"M{coordinate(x)} {coordinate(y)}L{coordinate(end_x)} {coordinate(end_y)}"
            self.drawn.append(tag("path", class_="leader", d=path))
        anchor, text_x = "middle", (box.left + box.right) / 2
        if box.left >= x or box.right <= x:
            anchor, text_x = ("start", box.left) if box.left >= x else ("end", box.right)
        for line, name in enumerate(names):
            base = box.top + _LINE_HEIGHT * line + 11.5
            self.drawn.append(write(text_x, base, name, "name", text_anchor=anchor))

    def _covered(self, box: _Box) -> float:
        return sum(box.overlap(other) for other in self._taken) + 10 * box.outside()


def _beside(
    place: tuple[float, float],
    direction: tuple[int, int],
    distance: float,
    width: float,
    height: float,
) -> _Box:
    across, up = direction
    share = math.sqrt(0.5) if across and up else 1.0
    x = place[0] + across * distance * share + (across - 1) * width / 2
    y = place[1] + up * distance * share + (up - 1) * height / 2
    return _Box(x, y, x + width, y + height)


def _join(plane: _MemoryPlane, mark: ScatterMark) -> str:
    if not _differs(mark):
        return ""
    x, high = plane.place(mark.memory, mark.bubble)
    _, low = plane.place(mark.memory, mark.stage_bubble)
    path = f"M{coordinate(x)} {coordinate(high)}V{coordinate(low)}"
    line = tag("path", class_="join", d=path)
    return line + tag("circle", class_="ring", cx=x, cy=low, r=_RADIUS)


def _legend(marks: Sequence[ScatterMark]) -> str:
    words = "makespan bubble"
    parts = [
        tag("circle", class_="dot", cx=_MARGIN + 6, cy=18, r=_RADIUS),
        write(_MARGIN + 18, 22, words),
    ]
    if any(map(_differs, marks)):
        x = _MARGIN + 18 + text_width(words, 12) + 16
        parts += [
            tag("circle", class_="ring", cx=x, cy=18, r=_RADIUS),
            write(x + 12, 22, "stage bubble, where it is another"),
        ]
    parts.append(write(_MARGIN, _TOP - 9, "bubble", "muted"))
    return lines(parts)


def _axes(plane: _MemoryPlane) -> str:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _MARGIN
    grid, axis, parts = "", f"M{_LEFT:g} {bottom:g}H{right:g}", []
    for value in ticks(0.0, plane.top, 8):
        _, y = plane.place(1.0, value)
        grid += f"M{_LEFT:g} {y:g}H{right:g}"
        label = f"{tick_label(round(100 * value, 6))}\N{NO-BREAK SPACE}%"
        parts.append(write(_LEFT - 8, y + 4, label, "muted", text_anchor="end"))
    for value in plane.memory_ticks():
        x, _ = plane.place(value, 0.0)
        axis += f"M{x:g} {bottom:g}v5"
        parts.append(write(x, bottom + 18, tick_label(value), "muted", text_anchor="middle"))
    name = "peak of activations, in microbatches of a rank's layers (logarithmic)"
    parts.append(write(_LEFT, bottom + 38, name, "muted"))
    return lines([tag("path", class_="grid", d=grid), tag("path", class_="axis", d=axis), *parts])


COLUMNS = ("", "makespan", "bubble", "stage bubble", "peak activations")
"""The numbers of each timeline, by name."""


@dataclass(frozen=True)
class Comparison:
    """Timelines that are to be looked at together. As text a table; in a notebook also a picture of
    all of them on one time axis.

    Attributes:
        timelines: each with its title.
    """

    timelines: tuple[Titled, ...]

    def rows(self) -> list[tuple[str, ...]]:
        """Title, makespan, both bubbles and peak of activations (in microbatches of a rank's
        layers) of each timeline, as text."""
        unit = unit_for([timeline for _, timeline in self.timelines])
        return [
            (
                title,
                unit.show(timeline.makespan),
                f"{timeline.bubble:.1%}",
                f"{timeline.stage_bubble:.1%}",
                f"{max(timeline.peak_activations, default=0):.4g}",
            )
            for title, timeline in self.timelines
        ]

    def __str__(self) -> str:
        rows = [COLUMNS, *self.rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if column else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )

    def _repr_html_(self) -> str:
        from penstock.drawing import cells

        table = cells.table(COLUMNS, self.rows())
        return cells.cell(table, cells.timelines_image(self.timelines))


Comparable = Schedule | Timeline | Foretold
"""Values that have a timeline, or can be simulated."""


@public()
def compare(
    *compared: Comparable | Mapping[str, Comparable], costs: Costs | None = None
) -> Comparison:
    """Put schedules, plans and timelines beside each other.

    Args:
        compared: schedules, which are simulated; plans, as they are predicted; timelines as they
            are, predicted or measured; or dicts of these, whose keys are their titles. By default a
            schedule is called by its name, all others by that and their source.
        costs: of a whole rank's layers, for the schedules; by default F = I = W = 1 and no hops.

    Raises:
        InputError: nothing to compare, something else than these, or two of the same title.
    """
    costs = Costs() if costs is None else costs
    expect(costs, Costs, "the costs", "make them with penstock.Costs")
    timelines = [(title, _timeline(source, costs)) for title, source in _titled(compared)]
    titles = [title for title, _ in timelines]
    if not titles:
        raise InputError("there is nothing to compare; give schedules, plans or timelines")
    if len(set(titles)) < len(titles):
        raise InputError(
            f"two of {', '.join(titles)} have the same title; give a dict with titles of your own"
        )
    return Comparison(tuple(timelines))


def _titled(
    compared: tuple[Comparable | Mapping[str, Comparable], ...],
) -> Iterator[tuple[str, Comparable]]:
    for source in compared:
        if isinstance(source, Mapping):
            yield from source.items()
        elif isinstance(source, Schedule):
            yield source.name or "schedule", source
        else:
            timeline = _timeline(source, Costs())
            yield title_of(timeline), timeline


def _timeline(source: Comparable, costs: Costs) -> Timeline:
    if isinstance(source, Timeline):
        return source
    if is_foretold(source):
        return source.simulate()
    expect(source, Schedule, "what is compared", "give schedules, plans or timelines")
    assert isinstance(source, Schedule)  # nothing else is expected
    return simulate(source, costs.spread(source.num_stages / source.num_ranks))
