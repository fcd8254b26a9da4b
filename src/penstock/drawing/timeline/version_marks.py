"""Which version of the weights an op read: a coloured band at the foot of its box.

Neighbouring versions differ in colour and the colours come round again, so that one sees at a
glance where a rank goes on to new weights and which backward reads what which forward read.
"""

from __future__ import annotations

from penstock.core.schedule.op import COMPUTE, Kind
from penstock.core.timing.spans import Span
from penstock.drawing.markup import Rectangle, resource, tag, text_width, write

BAND = 12.0
"""How high a band is, in pixels."""

NUM_COLOURS = 6
"""After so many versions, the colours v0, v1, … of the style sheet come round again."""

READING = COMPUTE | {Kind.RECOMPUTE}
"""Kinds that read weights."""

MEANS = "v2: weights read, after 2 updates"

_SIZE, _PADDING, _OVERHANG, _TICK = 9.0, 2.0, 3.0, 1.6


def style() -> str:
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
    fill = tag("rect", class_=f"v{version % NUM_COLOURS}", x=x, y=top, width=width, height=BAND)
    labels = (f"v{version}", str(version))
    fitting = (label for label in labels if text_width(label, _SIZE) + _PADDING <= width)
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


def swatch(width: float) -> str:
    """The colours of the first versions, for a legend."""
    each = width / 4
    return "".join(
        tag("rect", class_=f"v{version}", x=version * each, y=1, width=each, height=13)
        for version in range(4)
    )


def in_words(span: Span) -> str:
    """What a span has to do with versions, to go on a sentence; nothing if that is not known."""
    if span.version is None:
        return ""
    if span.op.kind is Kind.UPDATE:
        return f"; makes version {span.version + 1}"
    return f"; reads version {span.version}"
