"""What the marks of a figure mean, in as many lines as its width needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.core.schedule.op import WAITING, Kind
from penstock.core.timing.timeline import Timeline
from penstock.drawing.markup import coordinate, lines, tag, text_width, write
from penstock.drawing.timeline import link_rows, version_marks
from penstock.drawing.timeline.boxes import LETTERS, PALEST, WORDS, paint
from penstock.drawing.timeline.labels import Names

_SWATCH, _LINE_HEIGHT = 20.0, 22.0


def legend(
    timelines: Sequence[Timeline], left: float, top: float, width: float, versions: bool = False
) -> tuple[str, float]:
    """The legend's markup and its height."""
    x, y, parts = left, top, []
    for mark, words in _entries(timelines, versions):
        needed = _SWATCH + 7 + text_width(words, 12) + 14
        if x > left and x + needed > width - left:
            x, y = left, y + _LINE_HEIGHT
        place = f"translate({coordinate(x)} {coordinate(y)})"
        parts.append(tag("g", mark + write(_SWATCH + 7, 12, words), transform=place))
        x += needed
    return tag("g", f"\n{lines(parts)}\n", class_="legend"), y + _LINE_HEIGHT - top


def _entries(timelines: Sequence[Timeline], versions: bool) -> Iterator[tuple[str, str]]:
    """(swatch, words) of everything that occurs."""
    present = {span.op.kind for timeline in timelines for span in timeline.spans}
    for kind, letter in LETTERS.items():
        if kind in present:
            swatch = tag("rect", y=1, width=_SWATCH, height=13, rx=2, **paint(kind, 0))
            yield swatch, f"{letter} {WORDS[kind]}"
    if Kind.FORWARD in present:
        yield from ((_shades(count), words) for count, words in _stages(timelines))
    if versions:
        yield version_marks.swatch(_SWATCH), version_marks.MEANS
    if any(timeline.num_slices > 1 for timeline in timelines):
        words = "0.1: microbatch 0, slice 1 of its sequence"
        yield tag("rect", y=1, width=_SWATCH, height=13, rx=2, **paint(Kind.FORWARD, 0)), words
    if any(_waits(timeline) for timeline in timelines):
        path = f"M0 7.5h{_SWATCH:g}"
        yield tag("path", class_="wait", d=path), "waiting for another rank"
    carried = {transfer.kind for timeline in timelines for transfer in timeline.transfers}
    for transferred, words in link_rows.MEANS.items():
        if transferred in carried:
            yield link_rows.swatch(transferred, _SWATCH), words
    yield tag("rect", class_="track", x=0.5, y=1, width=_SWATCH - 1, height=13), "idle"
    if any(timeline.spans for timeline in timelines):
        path = f"M0 14V9H7V3H13V9H{_SWATCH:g}V14Z"
        yield tag("path", class_="held", d=path), "microbatches in flight"


def _stages(timelines: Sequence[Timeline]) -> Iterator[tuple[int, str]]:
    """How many shades there are, and what they mean."""
    names = [Names(timeline) for timeline in timelines]
    stages = max(one.most_stages for one in names)
    if stages > 1:
        yield stages, "1F0: of stage 1; later stages of a rank are paler"
    starts = max((one.starts for one in names), key=len)
    if len(starts) > 1:
        others = " or ".join(map(str, starts[1:]))
        yield len(starts), f"paler: microbatches that start on rank {others}"


def _shades(count: int) -> str:
    levels = sorted({round(k * PALEST / (count - 1)) for k in range(count)})
    width = _SWATCH / len(levels)
    return "".join(
        tag("rect", x=k * width, y=1, width=width, height=13, **paint(Kind.FORWARD, level))
        for k, level in enumerate(levels)
    )


def _waits(timeline: Timeline) -> bool:
    # What is shorter than this is not drawn either.
    least = timeline.makespan / 1000
    return any(s.op.kind in WAITING and s.end - s.start > least for s in timeline.spans)
