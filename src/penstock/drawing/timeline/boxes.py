"""One op as a box (its fill, its hatching, its label if that fits, its tooltip), and the legend,
which says what the marks of a timeline's figure mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.base.units import TimeUnit
from penstock.core.schedule.op import COMPUTE, WAITING, Kind
from penstock.core.schedule.residence import UPDATES
from penstock.core.timing.spans import BUSY, Span
from penstock.core.timing.timeline import Timeline
from penstock.drawing.markup import (
    LEGEND_SWATCH,
    Rectangle,
    legend_entries,
    lines,
    tag,
    text_width,
    times_in_words,
    write,
)
from penstock.drawing.timeline import labels, link_rows
from penstock.drawing.timeline.labels import (
    BAND,
    READING,
    Names,
    band,
    update_tick,
    version_words,
    without_kind,
)

LETTERS: Mapping[Kind, str] = {
    Kind.FORWARD: "F",
    Kind.RECOMPUTE: "R",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUT: "I",
    Kind.BACKWARD_WEIGHT: "W",
    Kind.UPDATE: "U",
    Kind.LATE_UPDATE: "U",
}
"""The letter of each kind, and its class in the style sheet."""

WORDS: Mapping[Kind, str] = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recomputed forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input gradient",
    Kind.BACKWARD_WEIGHT: "weight gradient",
    Kind.UPDATE: "update",
    Kind.LATE_UPDATE: "update of the minibatch before",
}

PALEST = 3
"""The last of the shades s0, s1, … that tell a rank's stages apart."""

_DOT = "a1 1 0 1 0 2 0a1 1 0 1 0 -2 0"
_MARKS: Mapping[Kind, str] = {
    Kind.RECOMPUTE: tag("path", class_="bars", d="M0 1.5H7M0 5H7"),
    Kind.BACKWARD_INPUT: tag("path", class_="hatch", d="M-1 8L8 -1M-1 1L1 -1M6 8L8 6"),
    Kind.BACKWARD_WEIGHT: tag("path", class_="dots", d=f"M1 2.5{_DOT}M4.5 6{_DOT}"),
}
"""The pattern over the boxes of a kind, so that it is known without its colour."""

_PADDING = 4.0
_NARROWEST_BOX, _NARROW = 0.8, 8.0


@dataclass(frozen=True)
class LabelStyle:
    """How the ops of one kind are labelled: ``4F0`` or, where that is too wide, ``0``: the colour
    tells the kind, the shade the stage."""

    size: float
    full: bool = True

    def text(self, name: str) -> str:
        """The text for the label ``name``."""
        return name if self.full else without_kind(name)

    def fits(self, name: str, width: float) -> bool:
        """Whether the label ``name`` stays inside a box of this width."""
        return text_width(self.text(name), self.size) + _PADDING <= width


_STYLES = (
    LabelStyle(12),
    LabelStyle(11),
    LabelStyle(10),
    LabelStyle(11, full=False),
    LabelStyle(10, full=False),
    LabelStyle(9, full=False),
    LabelStyle(8, full=False),
)


def widest_label(timeline: Timeline) -> float:
    """The width of a box in which every label of the compute ops fits comfortably."""
    names = Names(timeline)
    labels = {names.label(s.op, s.rank) for s in timeline.spans if s.op.kind in COMPUTE}
    return max((text_width(label, 11) for label in labels), default=0.0) + _PADDING


def label_styles(timeline: Timeline, names: Names, scale: float) -> dict[Kind, LabelStyle]:
    """For each kind, the largest style in which nearly all of its labels fit: one style per kind
    looks calmer than one per box. A kind is missing where none fits."""
    styles = {}
    for kind in BUSY:
        spans = [span for span in timeline.spans if span.op.kind is kind]
        labels = {names.label(span.op, span.rank) for span in spans}
        lengths = sorted(span.end - span.start for span in spans)
        if not lengths:
            continue
        width = lengths[len(lengths) // 10] * scale
        ordered = sorted(labels, key=len)
        # From microbatch 100 on, the labels of the first hundred are better than none.
        choices = [(ordered[-1], style) for style in _STYLES]
        choices.append((ordered[len(ordered) // 2], _STYLES[-1]))
        fitting = (style for label, style in choices if style.fits(label, width))
        style = next(fitting, None)
        if style is not None:
            styles[kind] = style
    return styles


def shade(names: Names, span: Span) -> int:
    """Which of the shades s0, s1, … a span's stage has: 0 for the first of its rank."""
    return round(names.shade(span.op, span.rank) * PALEST)


def paint(kind: Kind, shade: int) -> dict[str, str]:
    """The attribute that fills a box."""
    letter = LETTERS[kind]
    if kind in _MARKS:
        return {"fill": f"url(#penstock-{letter}{shade})"}
    return {"class_": f"{letter} s{shade}"}


def hatches(timelines: Sequence[Timeline]) -> str:
    """Definitions of the patterns that the boxes of these timelines refer to."""
    used = {
        (span.op.kind, shade(names, span))
        for timeline, names in ((timeline, Names(timeline)) for timeline in timelines)
        for span in timeline.spans
        if span.op.kind in _MARKS
    }
    return patterns(used)


def patterns(used: Iterable[tuple[Kind, int]]) -> str:
    """Definitions of the patterns of these kinds and shades; some need none."""
    return lines(_hatch(kind, level) for kind, level in sorted(used) if kind in _MARKS)


def _hatch(kind: Kind, level: int) -> str:
    letter = LETTERS[kind]
    fill = tag("rect", class_=f"{letter} s{level}", width=7, height=7)
    identity = f"penstock-{letter}{level}"
    return tag(
        "pattern",
        fill + _MARKS[kind],
        id=identity,
        width=7,
        height=7,
        patternUnits="userSpaceOnUse",
    )


def box(
    names: Names,
    span: Span,
    place: Rectangle,
    style: LabelStyle | None,
    unit: TimeUnit,
    versions: bool = False,
) -> str:
    """The element of one busy span at ``place``; with ``versions``, the version that the span read
    stands at its foot."""
    kind, level = span.op.kind, shade(names, span)
    words = tooltip(span, unit) + (version_words(span) if versions else "")
    parts = [tag("title", words)]
    x, y, width, height = place
    if versions and kind is Kind.UPDATE and width < _NARROWEST_BOX:
        parts.append(update_tick(place, f"{LETTERS[kind]} s{level}"))
    else:
        parts.append(_rectangle(place, paint(kind, level)))
    name = names.label(span.op, span.rank)
    if style is not None and style.fits(name, width):
        label_height = height - BAND if versions and kind in READING else height
        middle = y + label_height / 2 + style.size * 0.36
        size = f"font-size:{style.size:g}px"
        class_ = ink(kind, level)
        parts.append(write(x + width / 2, middle, style.text(name), class_, style=size))
    if versions and kind in READING and span.version is not None:
        gap = _gap(width)
        parts.append(band(span.version, (x + gap, y + 1, width - 2 * gap, height - 2)))
    return tag(
        "g",
        "".join(parts),
        class_="span",
        data_op=str(span.op),
        data_rank=span.rank,
        data_start=f"{span.start:.9g}",
        data_end=f"{span.end:.9g}",
    )


def _gap(width: float) -> float:
    """A hair of background between neighbours, unless it would eat the box."""
    return 0.5 if width > 4 else 0.0


def _rectangle(place: Rectangle, fill: dict[str, str]) -> str:
    x, y, width, height = place
    gap = _gap(width)
    wide = max(width - 2 * gap, _NARROWEST_BOX)
    corner = 2 if width > 8 else 0
    if width <= _NARROW and "class_" in fill:
        fill = {"class_": f"{fill['class_']} narrow"}
    return tag("rect", x=x + gap, y=y + 1, width=wide, height=height - 2, rx=corner, **fill)


def ink(kind: Kind, level: int) -> str:
    """The class of text that stands on a box."""
    letter = LETTERS[kind]
    if kind in _MARKS:
        return f"on-{letter} s{level}"
    return "on-dark" if kind in UPDATES or (kind is Kind.BACKWARD and level == 0) else ""


def tooltip(span: Span, unit: TimeUnit) -> str:
    """The words that appear over a span: its op, rank and times."""
    op = span.op
    words = f"{WORDS[op.kind]}, stage {op.stage}"
    if op.kind not in UPDATES:
        words += f", microbatch {op.microbatch}"
        words += f", slice {op.slice}" if op.slice else ""
    return f"{op}: {words}, rank {span.rank}; {times_in_words(span.start, span.end, unit)}"


def legend(
    timelines: Sequence[Timeline], left: float, top: float, width: float, versions: bool = False
) -> tuple[str, float]:
    """The legend's markup and its height."""
    parts, bottom = legend_entries(_entries(timelines, versions), left, top, width)
    return tag("g", f"\n{lines(parts)}\n", class_="legend"), bottom - top


def _entries(timelines: Sequence[Timeline], versions: bool) -> Iterator[tuple[str, str]]:
    """(swatch, words) of everything that occurs."""
    present = {span.op.kind for timeline in timelines for span in timeline.spans}
    for kind, letter in LETTERS.items():
        if kind in present:
            swatch = tag("rect", y=1, width=LEGEND_SWATCH, height=13, rx=2, **paint(kind, 0))
            yield swatch, f"{letter} {WORDS[kind]}"
    if Kind.FORWARD in present:
        yield from ((_shades(count), words) for count, words in _stages(timelines))
    if versions:
        yield labels.version_swatch(LEGEND_SWATCH), labels.VERSIONS_MEAN
    if any(timeline.num_slices > 1 for timeline in timelines):
        words = "0.1: microbatch 0, slice 1 of its sequence"
        yield (
            tag("rect", y=1, width=LEGEND_SWATCH, height=13, rx=2, **paint(Kind.FORWARD, 0)),
            words,
        )
    if any(_waits(timeline) for timeline in timelines):
        path = f"M0 7.5h{LEGEND_SWATCH:g}"
        yield tag("path", class_="wait", d=path), "waiting for another rank"
    carried = {transfer.kind for timeline in timelines for transfer in timeline.transfers}
    for transferred, words in link_rows.MEANS.items():
        if transferred in carried:
            yield link_rows.swatch(transferred, LEGEND_SWATCH), words
    yield tag("rect", class_="track", x=0.5, y=1, width=LEGEND_SWATCH - 1, height=13), "idle"
    if any(timeline.spans for timeline in timelines):
        path = f"M0 14V9H7V3H13V9H{LEGEND_SWATCH:g}V14Z"
        yield tag("path", class_="held", d=path), "microbatches in flight"


def _stages(timelines: Sequence[Timeline]) -> Iterator[tuple[int, str]]:
    """How many shades there are, and what they mean."""
    names = [Names(timeline) for timeline in timelines]
    stages = max(own.most_stages for own in names)
    if stages > 1:
        yield stages, "1F0: of stage 1; later stages of a rank are paler"
    starts = max((own.starts for own in names), key=len)
    if len(starts) > 1:
        others = " or ".join(map(str, starts[1:]))
        yield len(starts), f"paler: microbatches that start on rank {others}"


def _shades(count: int) -> str:
    levels = sorted({round(k * PALEST / (count - 1)) for k in range(count)})
    width = LEGEND_SWATCH / len(levels)
    return "".join(
        tag("rect", x=k * width, y=1, width=width, height=13, **paint(Kind.FORWARD, level))
        for k, level in enumerate(levels)
    )


def _waits(timeline: Timeline) -> bool:
    # What is shorter than this is not drawn either.
    least = timeline.makespan / 1000
    return any(s.op.kind in WAITING and s.end - s.start > least for s in timeline.spans)
