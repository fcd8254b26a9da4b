"""A timeline as a figure: a row per rank, a box per op, nothing where the rank is idle; below them,
a row per link that is known to have carried anything.

Kinds differ in colour (safe for colour-blind readers) and also in lightness and hatching, so that
a black-and-white print can be read: F light, B dark, I with stripes, W with dots, U darkest. Where
a rank holds several stages, later ones are paler. Under each row a thin area shows how many
microbatches the rank holds in flight. Several timelines stand below each other on one time axis,
so that a longer step is a longer picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.base.units import TimeUnit, format_share
from penstock.core.schedule.op import COMPUTE, WAITING, Kind
from penstock.core.timing.spans import BUSY, Span
from penstock.core.timing.timeline import Timeline
from penstock.drawing.markup import (
    Titled,
    UnitName,
    document,
    lines,
    longest,
    shortened,
    tag,
    text_width,
    tick_label,
    ticks,
    title_of,
    unit_for,
    write,
)
from penstock.drawing.timeline import labels, link_rows
from penstock.drawing.timeline.boxes import (
    LabelStyle,
    box,
    hatches,
    label_styles,
    legend,
    widest_label,
)
from penstock.drawing.timeline.excerpt import (
    OPS_PER_RANK,
    Excerpt,
    excerpts,
    shortened_to,
    whole_of,
)
from penstock.drawing.timeline.labels import Names

FIGURE_WIDTHS, PAGE_WIDTHS, CELL_WIDTHS = (800.0, 2400.0), (1000.0, 6000.0), (640.0, 1000.0)
"""The least and the most pixels that a picture is wide: one for paper, one that can be scrolled,
and one in a notebook's cell."""

_MARGIN = 16.0
_HEAD_HEIGHT = 50.0
_AXIS_HEIGHT = 46.0
_TICK_DISTANCE = 80.0
_SHRINKS_TO = 0.72
"""How narrow ops may be, as a share of what their labels need in the usual size: there are smaller
ones."""


def svg(
    timeline: Timeline,
    width: float | None = None,
    unit: UnitName | None = None,
    versions: bool = False,
    whole: bool = True,
) -> str:
    """Draw one timeline as a standalone SVG document.

    Args:
        width: of the picture in pixels; by default, as wide as the labels need, up to 2400.
        unit: of the times; by default guessed, see ``stacked``.
        versions: whether to show which version of the weights each op read.
        whole: whether the middle is drawn, too, if labels then do not fit.
    """
    title = title_of(timeline)
    return stacked([(title, timeline)], width, unit, versions=versions, whole=whole)


def stacked(
    timelines: Mapping[str, Timeline] | Sequence[Titled],
    width: float | None = None,
    unit: UnitName | None = None,
    width_range: tuple[float, float] = FIGURE_WIDTHS,
    versions: bool = False,
    whole: bool = True,
) -> str:
    """Draw several timelines, one below the other, on one time axis; of one with more than 20,000
    ops, only its beginning and its end.

    Args:
        width: of the picture in pixels; by default, as wide as the labels need.
        unit: ``"seconds"`` or ``"abstract"``; by default seconds if any timeline was measured or
            has only ops shorter than half a second.
        width_range: the least and the most that ``width`` is by default.
        versions: whether to show which version of the weights each op read.
        whole: whether the middle of a timeline is drawn, too, if labels then do not fit.
    """
    items = list(timelines.items() if isinstance(timelines, Mapping) else timelines)
    panels = excerpts(items, OPS_PER_RANK)
    if not whole:
        panels = _fitting(panels, width or width_range[1], unit, versions)
    frame = _frame([timeline for _, timeline in panels], width or width_range, unit, versions)
    parts, top = [], _MARGIN
    for title, timeline in panels:
        parts.append(_panel(frame, title, timeline, top))
        top += _HEAD_HEIGHT + frame.row * timeline.num_ranks + 10 + link_rows.height_of(timeline)
    parts.append(_axis(frame, top))
    top += _AXIS_HEIGHT
    shown = [timeline for _, timeline in panels]
    drawn, height = legend(shown, _MARGIN, top, frame.width, versions)
    parts.append(drawn)
    return _document(frame, top + height + _MARGIN, parts, panels)


@dataclass(frozen=True)
class _Canvas:
    """Where everything goes, in pixels; shared by all panels."""

    width: float
    left: float
    right: float
    extent: float
    unit: TimeUnit
    bar: float
    area: float
    most_held: float
    versions: bool

    @property
    def row(self) -> float:
        return self.bar + self.area + 10

    @property
    def scale(self) -> float:
        return (self.right - self.left) / self.extent if self.extent else 0.0

    def x(self, time: float) -> float:
        return self.left + time * self.scale


def _frame(
    timelines: Sequence[Timeline],
    width: float | tuple[float, float],
    unit: UnitName | None,
    versions: bool,
) -> _Canvas:
    ranks = max((timeline.num_ranks for timeline in timelines), default=1)
    named = [text_width(f"rank {max(ranks - 1, 0)}", 12), *map(link_rows.widest_name, timelines)]
    left = _MARGIN + max(named) + 10
    peaks = [peak for timeline in timelines for peak in timeline.peak_activations]
    after = 8 + max((text_width(_peak(peak), 11) for peak in peaks), default=0.0) + _MARGIN
    extent = longest(timelines)
    if isinstance(width, tuple):
        wanted = extent * max(map(_pixels_per_time, timelines), default=0.0) + left + after
        width = min(max(wanted, width[0]), width[1])
    width = round(max(width, left + after + 100))
    bar, area = (26.0, 13.0) if ranks <= 8 else (20.0, 10.0)
    if versions:
        bar += labels.BAND
    held = max(peaks, default=0.0)
    unit_of_times = unit_for(timelines, unit)
    right = width - after
    return _Canvas(width, left, right, extent, unit_of_times, bar, area, held, versions)


def _fitting(
    panels: Sequence[Titled], width: float, unit: UnitName | None, versions: bool
) -> list[Titled]:
    """Timelines whose labels fit into a width: the beginning and the end of each that is too
    long."""
    frame = _frame([timeline for _, timeline in panels], width, unit, versions)
    needed = max((_pixels_per_time(timeline) for _, timeline in panels), default=0.0)
    if not needed:
        return list(panels)
    length = (frame.right - frame.left) / (needed * _SHRINKS_TO)
    fitting: list[Titled] = []
    for title, timeline in panels:
        # What begins at the end of the first part goes on behind it.
        whole = isinstance(timeline, Excerpt) or timeline.makespan <= length
        parts = [(title, timeline)] if whole else shortened_to(title, timeline, 0.9 * length)
        fitting += parts
    return fitting


def _pixels_per_time(timeline: Timeline) -> float:
    """The scale at which ops of the usual length can carry their label."""
    lengths = sorted(s.end - s.start for s in timeline.spans if s.op.kind in COMPUTE)
    usual = lengths[len(lengths) // 10] if lengths else 0.0
    return widest_label(timeline) / usual if usual else 0.0


def _peak(held: float) -> str:
    return f"peak {held:.3g}"


def _document(frame: _Canvas, height: float, parts: list[str], panels: list[Titled]) -> str:
    named = "; ".join(f"{title}: {_facts(timeline, frame.unit)}" for title, timeline in panels)
    used = hatches([timeline for _, timeline in panels])
    definitions = tag("defs", used) if used else ""
    if frame.versions:
        definitions = lines([labels.version_style(), definitions])
    if any(timeline.transfers for _, timeline in panels):
        definitions = lines([link_rows.style(), definitions])
    size = frame.width, round(height)
    return document("timeline", size, named or "no timeline", "timeline.css", parts, definitions)


def _facts(timeline: Timeline, unit: TimeUnit) -> str:
    if not timeline.spans:
        return "no op ran"
    if isinstance(timeline, Excerpt) and timeline.rhythm is not None:
        first, beat, idle = timeline.rhythm
        return (
            f"in its steady state, from microbatch {first} on: one every {unit.show(beat)}, ranks "
            f"idle {format_share(idle)}"
        )
    return (
        f"makespan {unit.show(whole_of(timeline).makespan)} · "
        f"bubble {format_share(timeline.bubble)} · "
        f"stage bubble {format_share(timeline.stage_bubble)}"
    )


def _panel(frame: _Canvas, title: str, timeline: Timeline, top: float) -> str:
    """One timeline: its headline and its rows."""
    rows = top + _HEAD_HEIGHT
    links = rows + frame.row * timeline.num_ranks
    room = frame.width - 2 * _MARGIN
    names = Names(timeline)
    styles = label_styles(timeline, names, frame.scale)
    parts = [
        _tracks(frame, timeline, rows),
        _grid(frame, rows, links + link_rows.height_of(timeline) - 4),
    ]
    for rank in range(timeline.num_ranks):
        parts.append(_row(frame, timeline, names, rank, rows + rank * frame.row, styles))
    if timeline.transfers:
        parts.append(link_rows.boxes(timeline, frame.x, links, frame.unit, _zero(timeline)))
    parts += [
        write(_MARGIN, top + 14, shortened(title, 15, room), "title"),
        write(_MARGIN, top + 33, shortened(_facts(timeline, frame.unit), 12, room), "muted"),
        _names(frame, timeline, rows),
    ]
    return tag("g", f"\n{lines(parts)}\n", class_="panel")


def _names(frame: _Canvas, timeline: Timeline, top: float) -> str:
    """The names of the ranks, on their own ground: a page keeps them in view while it scrolls."""
    links = top + frame.row * timeline.num_ranks
    height = frame.row * timeline.num_ranks + link_rows.height_of(timeline)
    names = [tag("rect", class_="paper", y=top - 2, width=frame.left - 5, height=height)]
    for rank in range(timeline.num_ranks):
        names.append(write(_MARGIN, top + rank * frame.row + frame.bar / 2 + 4, f"rank {rank}"))
    if timeline.transfers:
        names.append(link_rows.names(timeline, _MARGIN, links, frame.left - _MARGIN - 8))
    return tag("g", f"\n{lines(names)}\n", class_="stay")


def _tracks(frame: _Canvas, timeline: Timeline, top: float) -> str:
    """The empty rows: as long as this timeline, so that idle time is what stays empty."""
    width = timeline.makespan * frame.scale if frame.extent else frame.right - frame.left
    return lines(
        tag(
            "rect",
            class_="track",
            x=frame.left,
            y=top + rank * frame.row,
            width=width,
            height=frame.bar,
        )
        for rank in range(timeline.num_ranks)
    )


def _ticks(frame: _Canvas) -> list[tuple[float, str]]:
    """(x, label) of each tick."""
    at_most = int((frame.right - frame.left) / _TICK_DISTANCE)
    values = ticks(0.0, frame.extent * frame.unit.factor, at_most)
    return [(frame.x(value / frame.unit.factor), tick_label(value)) for value in values]


def _grid(frame: _Canvas, top: float, bottom: float) -> str:
    path = "".join(f"M{x:.2f} {top:g}V{bottom:g}" for x, _ in _ticks(frame))
    return tag("path", class_="grid", d=path)


def _axis(frame: _Canvas, top: float) -> str:
    marks = _ticks(frame)
    path = f"M{frame.left:.2f} {top:g}H{frame.right:.2f}"
    path += "".join(f"M{x:.2f} {top:g}v5" for x, _ in marks)
    name = f"time ({frame.unit.suffix})" if frame.unit.suffix else "time (units of the costs)"
    return lines(
        [
            tag("path", class_="axis", d=path, fill="none"),
            *(write(x, top + 18, label, "muted small", text_anchor="middle") for x, label in marks),
            write(frame.left, top + 36, name, "muted small"),
        ]
    )


def _row(
    frame: _Canvas,
    timeline: Timeline,
    names: Names,
    rank: int,
    top: float,
    styles: Mapping[Kind, LabelStyle],
) -> str:
    zero, parts = _zero(timeline), []
    spans: Sequence[Span] = timeline.by_rank[rank]
    if frame.versions:
        # On top of their neighbours, which would cover half of what is so narrow.
        spans = sorted(spans, key=lambda span: span.op.kind is Kind.UPDATE)
    for span in spans:
        x, width = frame.x(span.start - zero), (span.end - span.start) * frame.scale
        if span.op.kind in BUSY:
            style = styles.get(span.op.kind)
            place = (x, top, width, frame.bar)
            parts.append(box(names, span, place, style, frame.unit, frame.versions))
        elif span.op.kind in WAITING and width > 1:
            path = f"M{x:.2f} {top + frame.bar / 2:g}h{width:.2f}"
            parts.append(tag("path", class_="wait", d=path))
    parts.append(_held(frame, timeline, rank, top + frame.bar + 3))
    return tag("g", f"\n{lines(parts)}\n", class_="row")


def _held(frame: _Canvas, timeline: Timeline, rank: int, top: float) -> str:
    """The in-flight curve of a rank: steps as high as the microbatches it holds."""
    peak = timeline.peak_activations[rank]
    if not peak:
        return ""
    base, unit_height = top + frame.area, frame.area / frame.most_held
    path = f"M{frame.x(0):.2f} {base:g}"
    for x, held in _steps(frame, timeline, rank):
        path += f"H{x:.2f}V{base - held * unit_height:.2f}"
    path += f"H{frame.x(timeline.makespan):.2f}V{base:g}Z"
    note = write(frame.right + 8, base, _peak(peak), "muted small")
    return lines([tag("path", class_="held", d=path), note])


def _steps(frame: _Canvas, timeline: Timeline, rank: int) -> list[tuple[float, float]]:
    """(x, held from there on). Where a backward ends as the next forward starts, the two changes
    lie in one pixel, and only what is held after both is kept."""
    zero, steps = _zero(timeline), [(frame.left, 0.0)]
    for time, held in timeline.in_flight[rank]:
        x = frame.x(max(time - zero, 0.0))
        if x - steps[-1][0] < 1:
            steps[-1] = (steps[-1][0], held)
        elif held != steps[-1][1]:
            steps.append((x, held))
    return [here for before, here in pairwise([(0.0, -1.0), *steps]) if before[1] != here[1]]


def _zero(timeline: Timeline) -> float:
    return min((span.start for span in timeline.spans), default=0.0)
