"""Schedules beside each other: their numbers in a table, and memory against bubble in a figure,
which is what a choice between schedules weighs.

The figure has a point per schedule and both bubbles: a filled mark for the makespan bubble and,
where the stage bubble is another, a hollow one joined to it. Every point bears its name; names move
out of each other's way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.base.arguments import public
from penstock.base.errors import InputError
from penstock.base.units import format_share
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
    title_of,
    unit_for,
    write,
)
from penstock.drawing.scatter_plot import LabelPlaces, PlotBox, ScatterAxis, drawn_axes

_WIDTH, _HEIGHT, _MARGIN = 760.0, 500.0, 16.0
_FRAME = PlotBox(62.0, 54.0, _WIDTH - _MARGIN, _HEIGHT - 54.0)
_RADIUS, _SIZE, _LINE_HEIGHT = 5.0, 12.0, 15.0
_DISTANCES = (4.0 + _RADIUS, 22.0, 36.0, 54.0)


class ScatterMark(NamedTuple):
    """A schedule in the picture: its peak of activations and its two bubbles."""

    name: str
    memory: float
    bubble: float
    stage_bubble: float

    @property
    def has_two(self) -> bool:
        """Whether its stage bubble is another than that of the makespan."""
        return abs(self.bubble - self.stage_bubble) > 1e-9


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
    labels = LabelPlaces(_FRAME, _obstacles(plane, marks), _DISTANCES)
    named: dict[tuple[float, float], list[ScatterMark]] = {}
    for mark in marks:
        named.setdefault(plane.place(mark.memory, mark.bubble), []).append(mark)
    names: list[str] = []
    for place, group in sorted(named.items()):
        names += _written(labels, place, [mark.name for mark in group])
        names += _hollow_names(plane, labels, group)
    parts = [
        _legend(marks),
        *drawn_axes(_FRAME, plane.across, plane.up),
        *(_join(plane, mark) for mark in marks),
        *names,
        *(tag("circle", class_="dot", cx=x, cy=y, r=_RADIUS) for x, y in named),
    ]
    words = f"peak activations against bubble: {', '.join(mark.name for mark in marks)}"
    return document("chart", (_WIDTH, _HEIGHT), words, "chart.css", parts)


def _hollow_names(
    plane: _MemoryPlane, labels: LabelPlaces, group: Sequence[ScatterMark]
) -> Iterator[str]:
    """Where some of the schedules of one point have another stage bubble, which."""
    lower: dict[tuple[float, float], list[str]] = {}
    for mark in group:
        if mark.has_two:
            lower.setdefault(plane.place(mark.memory, mark.stage_bubble), []).append(mark.name)
    for place, names in sorted(lower.items()):
        if len(names) < len(group):
            yield from _written(labels, place, names)


class _MemoryPlane:
    """From values to pixels: memory across, bubbles upwards from 0."""

    def __init__(self, marks: Sequence[ScatterMark]) -> None:
        self.across = ScatterAxis(
            "peak of activations, in microbatches of a rank's layers",
            [mark.memory for mark in marks] or [0.0],
            _FRAME.left,
            _FRAME.right,
            from_zero=False,
        )
        self.up = ScatterAxis(
            "bubble",
            [mark.bubble for mark in marks] or [0.0],
            _FRAME.bottom,
            _FRAME.top,
            is_linear=True,
            show=lambda share: f"{tick_label(round(100 * share, 6))}\N{NO-BREAK SPACE}%",
        )

    def place(self, memory: float, bubble: float) -> tuple[float, float]:
        """Where a value is drawn."""
        return self.across.place(memory), self.up.place(max(bubble, 0.0))


def _obstacles(plane: _MemoryPlane, marks: Sequence[ScatterMark]) -> Iterable[PlotBox]:
    for mark in marks:
        x, high = plane.place(mark.memory, mark.bubble)
        yield PlotBox.around((x, high), _RADIUS)
        if mark.has_two:
            _, low = plane.place(mark.memory, mark.stage_bubble)
            yield PlotBox.around((x, low), _RADIUS)
            yield PlotBox(x - 2, high, x + 2, low)


def _written(
    labels: LabelPlaces, place: tuple[float, float], names: Sequence[str]
) -> Iterator[str]:
    """Names, a line each, beside a point, or further away at the end of a line."""
    width = max(text_width(name, _SIZE) for name in names)
    box = labels.take(place, width, _LINE_HEIGHT * len(names))
    x, y = place
    end_x, end_y = min(max(x, box.left), box.right), min(max(y, box.top + 4), box.bottom - 4)
    if max(abs(end_x - x), abs(end_y - y)) > _DISTANCES[0] + 4:
        path = f"M{coordinate(x)} {coordinate(y)}L{coordinate(end_x)} {coordinate(end_y)}"
        yield tag("path", class_="leader", d=path)
    anchor, text_x = "middle", (box.left + box.right) / 2
    if box.left >= x or box.right <= x:
        anchor, text_x = ("start", box.left) if box.left >= x else ("end", box.right)
    for line, name in enumerate(names):
        base = box.top + _LINE_HEIGHT * line + 11.5
        yield write(text_x, base, name, "name", text_anchor=anchor)


def _join(plane: _MemoryPlane, mark: ScatterMark) -> str:
    if not mark.has_two:
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
    if any(mark.has_two for mark in marks):
        x = _MARGIN + 18 + text_width(words, 12) + 16
        parts += [
            tag("circle", class_="ring", cx=x, cy=18, r=_RADIUS),
            write(x + 12, 22, "stage bubble, where it is another"),
        ]
    return lines(parts)


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
                format_share(timeline.bubble),
                format_share(timeline.stage_bubble),
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
