"""Timelines for terminals and doctests: a row per rank, dots where it is idle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from penstock.drawing.labels import Names, headline
from penstock.drawing.units import Titled, longest
from penstock.schedule.op import Kind
from penstock.timeline import BUSY, Span, Timeline

IDLE, FILL = "·", "─"
_WIDEST_GRID = 240


def text(timeline: Timeline, width: int = 100) -> str:
    """Draw a timeline as text.

    Where every time is a multiple of one tick, each tick gets the same number of columns and every
    op its full label; otherwise the picture is scaled to ``width`` columns and narrow ops keep only
    their letter, or vanish.
    """
    return stacked_text([(timeline.name, timeline)], width)


def stacked_text(
    timelines: Sequence[Titled], width: int = 100, widest_grid: int = _WIDEST_GRID
) -> str:
    """Draw several timelines, one below the other, on one time axis.

    Args:
        timelines: each with its title.
        width: how many columns the time has where labels do not fit.
        widest_grid: how many it may have at most where they do.
    """
    named = [(title, timeline, Names(timeline)) for title, timeline in timelines]
    columns_per_unit = _scale([(one, names) for _, one, names in named], width, widest_grid)
    return "\n\n".join(
        "\n".join([headline(timeline, title), *_rows(timeline, names, columns_per_unit, width)])
        for title, timeline, names in named
    )


def columns_of_shortest(timelines: Iterable[Timeline], width: int) -> float:
    """How many of ``width`` columns the shortest op gets; below 1, letters fall out."""
    drawn = list(timelines)
    return _tick(drawn) * width / (longest(drawn) or 1)


def _rows(timeline: Timeline, names: Names, columns_per_unit: float, width: int) -> Iterator[str]:
    columns = round(timeline.makespan * columns_per_unit) if columns_per_unit else width
    margin = len(f"rank {timeline.num_ranks - 1}")
    labelled = _labelled(timeline, names, columns_per_unit)
    for rank, spans in enumerate(timeline.by_rank):
        row = [IDLE] * columns
        for span in spans:
            start, length = _place(span, columns_per_unit)
            if span.op.kind in BUSY and length > 0:
                name = names.label(span.op, rank)
                shown = name if span.op.kind in labelled and len(name) <= length else name[:1]
                row[start : start + length] = shown.ljust(length, FILL)
        peak = f"{timeline.peak_activations[rank]:.4g}"
        yield f"{f'rank {rank}':<{margin}} │{''.join(row)}│ peak {peak}"


def _labelled(timeline: Timeline, names: Names, columns_per_unit: float) -> set[Kind]:
    """The kinds of which nearly all ops have room for their label: some with and some without
    would be hard to read."""
    fits: dict[Kind, list[bool]] = {}
    for span in _working(timeline):
        label = names.label(span.op, span.rank)
        room = _place(span, columns_per_unit)[1]
        fits.setdefault(span.op.kind, []).append(len(label) <= room)
    return {kind for kind, found in fits.items() if sum(found) >= 0.9 * len(found)}


def _place(span: Span, columns_per_unit: float) -> tuple[int, int]:
    """The first column and how many."""
    start = round(span.start * columns_per_unit)
    return start, round(span.end * columns_per_unit) - start


def _scale(timelines: Sequence[tuple[Timeline, Names]], width: int, widest_grid: int) -> float:
    """Columns per unit of time; 0 where nothing takes time."""
    tick = _tick([timeline for timeline, _ in timelines])
    if not tick:
        return 0.0
    cell = max(
        len(names.label(span.op, span.rank))
        for timeline, names in timelines
        for span in _working(timeline)
    )
    extent = longest([timeline for timeline, _ in timelines])
    if all(_even(one, tick) for one, _ in timelines):
        if extent / tick * cell <= widest_grid:
            return cell / tick
        # Whole columns per tick: ops of one length then look alike.
        width -= int(width % (extent / tick)) if width * tick >= extent else 0
    return width / extent


def _tick(timelines: Iterable[Timeline]) -> float:
    return min(
        (
            span.end - span.start
            for timeline in timelines
            for span in _working(timeline)
            if span.end > span.start
        ),
        default=0.0,
    )


def _even(timeline: Timeline, tick: float) -> bool:
    counts = (time / tick for span in _working(timeline) for time in (span.start, span.end))
    return all(abs(count - round(count)) < 1e-6 for count in counts)


def _working(timeline: Timeline) -> Iterator[Span]:
    return (span for span in timeline.spans if span.op.kind in BUSY)
