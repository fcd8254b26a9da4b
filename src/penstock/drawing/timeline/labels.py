"""The text on a span, the same in every kind of picture, and the mark of the weights that it read,
a coloured band at the foot of its box.

Neighbouring versions differ in colour and the colours come round again, so that one sees at a
glance where a rank goes on to new weights and which backward reads what which forward read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from penstock.base.units import format_share, four_digits
from penstock.core.schedule.op import COMPUTE, Kind, Op
from penstock.core.timing.spans import Span
from penstock.core.timing.timeline import Timeline
from penstock.drawing.markup import Rectangle, resource, tag, text_width, write
from penstock.drawing.timeline.excerpt import Excerpt, whole_of

_SHORT = {Kind.UPDATE: "U", Kind.LATE_UPDATE: "U"}


class Names:
    """The names of the ops of one timeline, and the shades that tell a rank's stages apart.

    An op's own text is stage, kind, microbatch, as in ``2F0``. Where a rank has one stage, its row
    says which, and the label leaves it out.

    Where stages have copies, microbatches that start on different ranks take different ways, and
    a rank's two stages may belong to two ways. Ways then differ in shade; the microbatch says
    which stage it is.

    Attributes:
        starts: the ranks on which microbatches start, ascending.
        most_stages: the most stages of one rank that one microbatch visits.
    """

    def __init__(self, timeline: Timeline) -> None:
        timeline = whole_of(timeline)
        self._sliced = timeline.num_slices > 1
        self._way: dict[int, int] = {
            op.microbatch: rank
            for rank, row in enumerate(timeline.rows)
            for op in row.ops
            if op.stage == 0 and op.kind is Kind.FORWARD
        }
        self.starts = tuple(sorted(set(self._way.values())))
        # Where all start on one rank, so did those whose start is not shown.
        self._unseen = self.starts[0] if len(self.starts) == 1 else -1
        computed = [
            sorted({self._place(op) for op in row.ops if op.kind in COMPUTE})
            for row in timeline.rows
        ]
        self._shades = [{place: index for index, place in enumerate(places)} for places in computed]
        most = list(map(_most_of_one_way, computed))
        self.most_stages = max(most, default=1)
        self._several = [stages > 1 for stages in most]

    def _place(self, op: Op) -> tuple[int, int]:
        return self._way.get(op.microbatch, self._unseen), op.stage

    def label(self, op: Op, rank: int) -> str:
        """Kind and microbatch, as in ``F0``; behind it the slice, as in ``F0.1``, and where a
        microbatch visits several stages of the rank, the stage in front, as in ``4F0``."""
        if op.kind in _SHORT:
            return _SHORT[op.kind]
        # Beside F0.1, a plain F0 would look like the whole microbatch.
        slice_ = f".{op.slice}" if self._sliced else ""
        stage = str(op.stage) if self._several[rank] else ""
        return f"{stage}{op.kind.value}{op.microbatch}{slice_}"

    def shade(self, op: Op, rank: int) -> float:
        """Where the op's stage stands among those of its rank, from 0 (first) to 1 (last)."""
        shades = self._shades[rank]
        return shades.get(self._place(op), 0) / max(len(shades) - 1, 1)


def _most_of_one_way(places: Iterable[tuple[int, int]]) -> int:
    """The most stages that belong to one way, of (way, stage)."""
    return max(Counter(way for way, _ in places).values(), default=0)


def without_kind(label: str) -> str:
    """The microbatch and slice of a label, where colour or row says the rest; all of a label that
    has none, as an update's.

    >>> without_kind("4F0.1"), without_kind("F12"), without_kind("U")
    ('0.1', '12', 'U')
    """
    return label.lstrip("0123456789")[1:] or label


def headline(timeline: Timeline, title: str = "") -> str:
    """One line of facts: name (or the title instead), source, makespan and both bubbles."""
    name = title or timeline.name or "schedule"
    if isinstance(timeline, Excerpt) and timeline.rhythm is not None:
        first, beat, idle = timeline.rhythm
        return (
            f"{name}, {timeline.source}, in its steady state, from microbatch {first} on: "
            f"one every {four_digits(beat)}, ranks idle {format_share(idle)}"
        )
    return (
        f"{name}, {timeline.source}: makespan {four_digits(whole_of(timeline).makespan)}, "
        f"bubble {format_share(timeline.bubble)}, "
        f"stage bubble {format_share(timeline.stage_bubble)}"
    )


BAND = 12.0
"""How high a band is, in pixels."""

_NUM_COLOURS = 6
"""After so many versions, the colours v0, v1, … of the style sheet come round again."""

READING = COMPUTE | {Kind.RECOMPUTE}
"""Kinds that read weights."""

VERSIONS_MEAN = "v2: weights read, after 2 updates"

_VERSION_SIZE, _VERSION_PADDING, _OVERHANG, _TICK = 9.0, 2.0, 3.0, 1.6


def version_style() -> str:
    """The style sheet of these marks."""
    return tag("style", f"\n{resource('versions.css')}\n")


def band(version: int, place: Rectangle) -> str:
    """The band of an op that read a version.

    Args:
        version: its number, from 0.
        place: of the op's coloured rectangle.
    """
    x, y, width, height = place
    top = y + height - BAND
    fill = tag("rect", class_=f"v{version % _NUM_COLOURS}", x=x, y=top, width=width, height=BAND)
    labels = (f"v{version}", str(version))
    fitting = (
        label for label in labels if text_width(label, _VERSION_SIZE) + _VERSION_PADDING <= width
    )
    label = next(fitting, None)
    words = write(x + width / 2, top + 9.3, label, "version") if label else ""
    return fill + words


def update_tick(place: Rectangle, class_: str) -> str:
    """An update that takes no time: a line across the row, a little longer than the row is high."""
    x, y, _, height = place
    return tag(
        "rect",
        class_=class_,
        x=x - _TICK / 2,
        y=y - _OVERHANG,
        width=_TICK,
        height=height + 2 * _OVERHANG,
    )


def version_swatch(width: float) -> str:
    """The colours of the first versions, for a legend."""
    each = width / 4
    return "".join(
        tag("rect", class_=f"v{version}", x=version * each, y=1, width=each, height=13)
        for version in range(4)
    )


def version_words(span: Span) -> str:
    """The version that a span reads or makes, to go on a sentence; nothing if that is not known."""
    if span.version is None:
        return ""
    if span.op.kind is Kind.UPDATE:
        return f"; makes version {span.version + 1}"
    return f"; reads version {span.version}"
