"""Timelines for terminals and doctests: a row per rank, dots where it is idle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from textwrap import wrap
from typing import NamedTuple

from penstock.base.units import four_digits
from penstock.core.schedule.op import Kind
from penstock.core.timing.spans import BUSY, Span
from penstock.core.timing.timeline import Timeline
from penstock.drawing.markup import Titled, longest
from penstock.drawing.timeline.excerpt import Excerpt, beginning, excerpts
from penstock.drawing.timeline.labels import READING, Names, headline, without_kind
from penstock.drawing.timeline.link_rows import LETTERS, LinkRow, label_of, link_rows

IDLE, FILL = "·", "─"
_WIDEST_GRID = 240
_NARROWEST = 20
"""Columns that the time has at least."""

_OPS_PER_RANK = 20
"""How many are drawn at either end of a timeline that is too long."""
_WIDE_LABEL = 4
"""Columns of an op, so that its label has room."""
_BLANKS = "  "
"""Beside the frame, one on either side."""

_READS = "reads"
_READS_MEANS = (
    "reads: the version of the weights that the op above reads; version v has had v updates"
)


class _TextRow(NamedTuple):
    """A line of the picture: whose it is, what happens, and what is said at its end."""

    name: str
    cells: str
    note: str = ""


def text(
    timeline: Timeline, width: int = 100, versions: bool = False, window: int | None = None
) -> str:
    """Draw a timeline as text.

    Where every time is a multiple of one tick, each tick gets the same number of columns and every
    op its full label; otherwise the picture is scaled to ``width`` columns and narrow ops keep only
    their letter, or vanish.

    Args:
        width: how many columns the time has where labels do not fit.
        versions: whether to write under each op which version of the weights it read. Where full
            labels would need more than ``width`` columns, the longest then lose their letter.
        window: how many columns a line may have; what is wider goes on below. By default, lines
            are as long as the picture is.
    """
    return stacked_text([(timeline.name, timeline)], width, versions=versions, window=window)


def stacked_text(
    timelines: Sequence[Titled],
    width: int = 100,
    widest_grid: int = _WIDEST_GRID,
    versions: bool = False,
    window: int | None = None,
) -> str:
    """Draw several timelines, one below the other, on one time axis; of one with more than 20,000
    ops, only its beginning and its end.

    Args:
        width: how many columns the time has where labels do not fit.
        widest_grid: how many it may have at most where they do.
        versions, window: as in ``text``; a window says the width, too.
    """
    shown = [
        (title, _readable(timeline, width if window is None else window))
        for title, timeline in excerpts(timelines, _OPS_PER_RANK, from_zero=True)
    ]
    named = [(title, timeline, Names(timeline)) for title, timeline in shown]
    drawn = [(timeline, names) for _, timeline, names in named]
    if window is not None:
        width = max([_NARROWEST, *(window - columns_beside(timeline) for timeline, _ in drawn)])
    columns_per_unit = _scale(drawn, width, widest_grid, versions)
    step = max(round(_tick([timeline for timeline, _ in drawn]) * columns_per_unit), 1)
    pictures = []
    for title, timeline, names in named:
        rows = list(_rows(timeline, names, columns_per_unit, width, versions))
        lines = [*_wrapped(headline(timeline, title), window), *_lines(rows, window, step)]
        pictures.append("\n".join(lines))
    picture = "\n\n".join(pictures)
    return "\n".join([picture, *_wrapped(_READS_MEANS, window)]) if versions else picture


def _readable(timeline: Timeline, width: int) -> Timeline:
    """Of a steady state, whose microbatches look alike, fewer of them, where ops would be narrower
    than a column; any other timeline itself."""
    if not isinstance(timeline, Excerpt) or timeline.rhythm is None:
        return timeline
    if columns_of_shortest([timeline], width) >= 1:
        return timeline
    labelled = _WIDE_LABEL * timeline.rhythm.beat / (_tick([timeline]) or 1)
    return beginning(timeline, max(int(width / labelled), 1))


def _wrapped(line: str, window: int | None) -> list[str]:
    return [line] if window is None else wrap(line, window, break_on_hyphens=False)


def columns_beside(timeline: Timeline) -> int:
    """How many columns of a drawing are not time."""
    return _beside(_named(timeline))


def _named(timeline: Timeline) -> list[_TextRow]:
    """The rows without what happens in them."""
    ranks = [
        _TextRow(f"rank {rank}", "", _peak(timeline, rank)) for rank in range(timeline.num_ranks)
    ]
    return [*ranks, *(_TextRow(_name_of(link), "") for link in link_rows(timeline))] or [
        _TextRow("", "")
    ]


def _name_of(link: LinkRow) -> str:
    return link.name.replace(" ", "")


def _peak(timeline: Timeline, rank: int) -> str:
    return f"peak {four_digits(timeline.peak_activations[rank])}"


def _beside(rows: Iterable[_TextRow]) -> int:
    """How many columns stand beside the time: names, frame and notes."""
    shown = list(rows)
    names = max(len(row.name) for row in shown)
    return names + len("││") + len(_BLANKS) + max(len(row.note) for row in shown)


def _lines(rows: Sequence[_TextRow], window: int | None, step: int) -> Iterator[str]:
    """Rows as lines. What is wider than the window has no blanks beside its frame and, where that
    is not enough, goes on below, as music goes on in the next line; an op of the least length is
    never parted.

    Args:
        step: how many columns such an op has.
    """
    columns = max((len(row.cells) for row in rows), default=0)
    if window is not None and rows and columns + _beside(rows) > window:
        room = max(window - _beside(rows) + len(_BLANKS), _NARROWEST)
        bands = ceil(columns / max(room - room % step, 1))
        yield from _banded(rows, ceil(columns / bands / step) * step, blank="")
    else:
        yield from _banded(rows, max(columns, 1))


def _banded(rows: Sequence[_TextRow], band: int, blank: str = " ") -> Iterator[str]:
    margin = max((len(row.name) for row in rows), default=0)
    columns = max((len(row.cells) for row in rows), default=0)
    for start in range(0, max(columns, 1), band):
        if start:
            yield ""
        for row in rows:
            note = f"{blank}{row.note}" if row.note and start + band >= columns else ""
            yield f"{row.name:<{margin}}{blank}│{row.cells[start : start + band]}│{note}"


def columns_of_shortest(timelines: Iterable[Timeline], width: int) -> float:
    """How many of ``width`` columns the shortest op gets; below 1, letters fall out."""
    drawn = list(timelines)
    return _tick(drawn) * width / (longest(drawn) or 1)


def _rows(
    timeline: Timeline, names: Names, columns_per_unit: float, width: int, versions: bool
) -> Iterator[_TextRow]:
    columns = round(timeline.makespan * columns_per_unit) if columns_per_unit else width
    labelled = _labelled(timeline, names, columns_per_unit, versions)
    for rank, spans in enumerate(timeline.by_rank):
        row = [IDLE] * columns
        for span in spans:
            start, length = _place(span, columns_per_unit)
            if span.op.kind in BUSY and length > 0:
                label = names.label(span.op, rank)
                fitting = _fitting(label, length, versions) if span.op.kind in labelled else ""
                shown = fitting or label.lstrip("0123456789")[:1]
                row[start : start + length] = shown.ljust(length, FILL)
        yield _TextRow(f"rank {rank}", "".join(row), _peak(timeline, rank))
        if versions:
            yield _TextRow(_READS, _reads(spans, columns_per_unit, columns))
    for link in link_rows(timeline):
        carried = _carried(link, columns_per_unit, columns)
        if carried.strip(IDLE):  # what is too short to be seen needs no row
            yield _TextRow(_name_of(link), carried)


def _carried(link: LinkRow, columns_per_unit: float, columns: int) -> str:
    """The transfers of a link, as boxes with the letter and the number of each."""
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


def _fitting(label: str, room: int, bare: bool) -> str:
    """The label if there is room for it; if need be and allowed, without its letter."""
    if _columns_of(label) <= room:
        return label
    short = without_kind(label)
    # One digit alone could be anything.
    return short if bare and 1 < len(short) <= room else ""


def _columns_of(label: str) -> int:
    """How many columns a label needs: one that begins with a digit ends in a line, or the number
    before it would run into it."""
    return len(label) + label[0].isdigit()


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
        _columns_of(names.label(span.op, span.rank))
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
