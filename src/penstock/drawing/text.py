"""A timeline for terminals and doctests: a row per rank, dots where it is idle."""

from __future__ import annotations

from penstock.drawing.labels import headline, label
from penstock.timeline import BUSY, Span, Timeline

IDLE, FILL = "·", "─"
_WIDEST_GRID = 240


def text(timeline: Timeline, width: int = 100) -> str:
    """Draw a timeline as text.

    Where every time is a multiple of one tick, each tick gets the same number of columns and every
    op its full label; otherwise the picture is scaled to ``width`` columns and narrow ops keep only
    their letter, or vanish.
    """
    columns_per_unit, columns = _scale(timeline, width)
    rows = [headline(timeline)]
    margin = len(f"rank {timeline.num_ranks - 1}")
    for rank, spans in enumerate(timeline.by_rank):
        row = [IDLE] * columns
        for span in spans:
            if span.op.kind in BUSY:
                _paint(row, span, label(timeline, span.op, rank), columns_per_unit)
        peak = f"{timeline.peak_activations[rank]:g}"
        rows.append(f"{f'rank {rank}':<{margin}} │{''.join(row)}│ peak {peak}")
    return "\n".join(rows)


def _paint(row: list[str], span: Span, name: str, columns_per_unit: float) -> None:
    start = round(span.start * columns_per_unit)
    length = round(span.end * columns_per_unit) - start
    if length > 0:
        shown = name if len(name) <= length else name[:1]
        row[start : start + length] = shown.ljust(length, FILL)


def _scale(timeline: Timeline, width: int) -> tuple[float, int]:
    """(columns per unit of time, number of columns)."""
    working = [span for span in timeline.spans if span.op.kind in BUSY]
    tick = min((span.end - span.start for span in working if span.end > span.start), default=0)
    if not tick:
        return 0.0, width
    labels = (label(timeline, span.op, span.rank) for span in working)
    cell = max(map(len, labels))
    ticks = [time / tick for span in working for time in (span.start, span.end)]
    even = all(abs(count - round(count)) < 1e-6 for count in ticks)
    if even and timeline.makespan / tick * cell <= _WIDEST_GRID:
        return cell / tick, round(timeline.makespan / tick) * cell
    return width / timeline.makespan, width
