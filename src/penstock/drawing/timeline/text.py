"""Timelines for terminals and doctests: a row per rank, dots where it is idle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from penstock.core.schedule.op import Kind
from penstock.core.timing.spans import BUSY, Span
from penstock.core.timing.timeline import Timeline
from penstock.drawing.axes import Titled, longest
from penstock.drawing.timeline.excerpt import excerpts
from penstock.drawing.timeline.labels import Names, headline
from penstock.drawing.timeline.link_rows import LETTERS, LinkRow, label_of, link_rows
from penstock.drawing.timeline.version_marks import READING

IDLE, FILL = "·", "─"
_WIDEST_GRID = 240
_OPS_PER_RANK = 20
"""How many are drawn at either end of a timeline that is too long."""
_READS = "reads"
_READS_MEANS = (
    "reads: the version of the weights that the op above reads; version v has had v updates"
)


def text(timeline: Timeline, width: int = 100, versions: bool = False) -> str:
    """Draw a timeline as text.

    Where every time is a multiple of one tick, each tick gets the same number of columns and every
    op its full label; otherwise the picture is scaled to ``width`` columns and narrow ops keep only
    their letter, or vanish.

    Args:
        width: how many columns the time has where labels do not fit.
        versions: whether to write under each op which version of the weights it read. Where full
            labels would need more than ``width`` columns, the longest then lose their letter.
    """
    return stacked_text([(timeline.name, timeline)], width, versions=versions)


def stacked_text(
    timelines: Sequence[Titled],
    width: int = 100,
    widest_grid: int = _WIDEST_GRID,
    versions: bool = False,
) -> str:
    """Draw several timelines, one below the other, on one time axis; of one with more than 50,000
    ops, only its beginning and its end.

    Args:
        width: how many columns the time has where labels do not fit.
        widest_grid: how many it may have at most where they do.
        versions: as in ``text``.
    """
    shown = excerpts(timelines, _OPS_PER_RANK, from_zero=True)
    named = [(title, timeline, Names(timeline)) for title, timeline in shown]
    drawn = [(timeline, names) for _, timeline, names in named]
    columns_per_unit = _scale(drawn, width, widest_grid, versions)
    pictures = (
        [headline(timeline, title), *_rows(timeline, names, columns_per_unit, width, versions)]
        for title, timeline, names in named
    )
    picture = "\n\n".join(map("\n".join, pictures))
    return f"{picture}\n{_READS_MEANS}" if versions else picture


def columns_of_shortest(timelines: Iterable[Timeline], width: int) -> float:
    """How many of ``width`` columns the shortest op gets; below 1, letters fall out."""
    drawn = list(timelines)
    return _tick(drawn) * width / (longest(drawn) or 1)


def _rows(
    timeline: Timeline, names: Names, columns_per_unit: float, width: int, versions: bool
) -> Iterator[str]:
    columns = round(timeline.makespan * columns_per_unit) if columns_per_unit else width
    links = link_rows(timeline)
    names_of_links = [link.name.replace(" ", "") for link in links]
    margin = max(map(len, [f"rank {timeline.num_ranks - 1}", *names_of_links]))
    labelled = _labelled(timeline, names, columns_per_unit, versions)
    for rank, spans in enumerate(timeline.by_rank):
        row = [IDLE] * columns
        for span in spans:
            start, length = _place(span, columns_per_unit)
            if span.op.kind in BUSY and length > 0:
                name = names.label(span.op, rank)
                fitting = _fitting(name, length, versions) if span.op.kind in labelled else ""
                shown = fitting or name[:1]
                row[start : start + length] = shown.ljust(length, FILL)
        peak = f"{timeline.peak_activations[rank]:.4g}"
        yield f"{f'rank {rank}':<{margin}} │{''.join(row)}│ peak {peak}"
        if versions:
            yield f"{_READS:<{margin}} │{_reads(spans, columns_per_unit, columns)}│"
    for name, link in zip(names_of_links, links, strict=True):
        carried = _carried(link, columns_per_unit, columns)
        if carried.strip(IDLE):  # what is too short to be seen needs no row
            yield f"{name:<{margin}} │{carried}│"


def _carried(link: LinkRow, columns_per_unit: float, columns: int) -> str:
    """What a link carries, as boxes with the letter and the number of each."""
    row = [IDLE] * columns
    for transfer in link.transfers:
        start = round(transfer.start * columns_per_unit)
        length = min(round(transfer.end * columns_per_unit), columns) - start
        name = f"{LETTERS[transfer.kind]}{label_of(transfer)}"
        if length > 0:
            shown = name if len(name) <= length else name[:1]
            row[start : start + length] = shown.ljust(length, FILL)
    return "".join(row)


def _reads(spans: Iterable[Span], columns_per_unit: float, columns: int) -> str:
    """Versions under the ops that read them, each below the op's microbatch."""
    row = [" "] * columns
    for span in spans:
        start, length = _place(span, columns_per_unit)
        if span.version is not None and span.op.kind in READING and length > 0:
            number = str(span.version)
            # In a single column, it would look like a digit of its neighbour's.
            fits = len(number) <= length > 1
            shown = number.rjust(min(length, len(number) + 1)) if fits else "·"
            row[start : start + length] = shown.ljust(length)
    return "".join(row)


def _fitting(name: str, room: int, bare: bool) -> str:
    """The label if there is room for it; if need be and allowed, without its letter."""
    if len(name) <= room:
        return name
    # One digit alone could be anything.
    return name[1:] if bare and 1 < len(name) - 1 <= room else ""


def _labelled(timeline: Timeline, names: Names, columns_per_unit: float, bare: bool) -> set[Kind]:
    """The kinds of which nearly all ops have room for their label: some with and some without
    would be hard to read."""
    fits: dict[Kind, list[bool]] = {}
    for span in _working(timeline):
        label = names.label(span.op, span.rank)
        room = _place(span, columns_per_unit)[1]
        fits.setdefault(span.op.kind, []).append(bool(_fitting(label, room, bare)))
    return {kind for kind, fitting in fits.items() if sum(fitting) >= 0.9 * len(fitting)}


def _place(span: Span, columns_per_unit: float) -> tuple[int, int]:
    """The first column and how many."""
    start = round(span.start * columns_per_unit)
    return start, round(span.end * columns_per_unit) - start


def _scale(
    timelines: Sequence[tuple[Timeline, Names]], width: int, widest_grid: int, bare: bool
) -> float:
    """Columns per unit of time; 0 where nothing takes time. ``bare``: rather than more than
    ``width`` of them, give the longest labels no room for their letter."""
    tick = _tick([timeline for timeline, _ in timelines])
    if not tick:
        return 0.0
    cell = max(
        len(names.label(span.op, span.rank))
        for timeline, names in timelines
        for span in _working(timeline)
    )
    extent = longest([timeline for timeline, _ in timelines])
    if all(_even(timeline, tick) for timeline, _ in timelines):
        if bare and extent / tick * cell > width:
            cell = max(cell - 1, 2)
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
