"""The few words of SVG and HTML that all pictures are written in, and what goes along their axes:
round ticks, and the unit in which times are read best.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Literal, TypeAlias

from penstock.base.units import TimeUnit, picture_seconds, unit_of_seconds

if TYPE_CHECKING:  # they load numpy, which the pictures of a cluster or a graph do without
    from penstock.core.timing.timeline import Timeline

Rectangle = tuple[float, float, float, float]
"""x, y, width and height in pixels."""

# XML has no way to write these characters, not even escaped.
_UNWRITABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_NARROW, _WIDE, _BROAD = frozenset(" .,:;|!'()ijltfrI·"), frozenset("MWmw@%—…"), frozenset("BF")


def escaped(text: str) -> str:
    """Text that is safe between tags and inside quoted attributes."""
    return html.escape(_UNWRITABLE.sub("\N{REPLACEMENT CHARACTER}", text), quote=True)


def coordinate(value: float) -> str:
    """A length in pixels: a hundredth is finer than any screen, and short."""
    return f"{round(value, 2) or 0:g}" if abs(value) < 1e5 else f"{value:.0f}"


def tag(name: str, content: str = "", **attributes: str | float) -> str:
    """An element. ``content`` is markup already; attribute values are escaped here.

    A trailing underscore is dropped from attribute names (``class_``), other underscores become
    hyphens (``data_op``).
    """
    parts = [name]
    for key, value in attributes.items():
        shown = escaped(value) if isinstance(value, str) else coordinate(value)
        parts.append(f'{key.rstrip("_").replace("_", "-")}="{shown}"')
    opening = " ".join(parts)
    return f"<{opening}>{content}</{name}>" if content else f"<{opening}/>"


def write(x: float, y: float, text: str, class_: str = "", **attributes: str | float) -> str:
    """A line of SVG text; ``text`` is plain."""
    if class_:
        attributes["class_"] = class_
    return tag("text", escaped(text) or " ", x=x, y=y, **attributes)


def lines(parts: Iterable[str]) -> str:
    """Parts on lines of their own, without the empty ones."""
    return "\n".join(part for part in parts if part)


def text_width(text: str, size: float) -> float:
    """How wide ``text`` is at most, in the widest of the usual sans-serif fonts."""
    return size * sum(map(_em, text))


def _em(character: str) -> float:
    if character in _NARROW:
        return 0.42
    if character in _WIDE:
        return 1.0
    if character in _BROAD:
        return 0.69
    return 0.78 if character.isupper() else 0.64


def shortened(text: str, size: float, width: float) -> str:
    """``text``, cut with an ellipsis where it would be wider than ``width``."""
    if text_width(text, size) <= width:
        return text
    return text[: _num_fitting(text, size, width - text_width("…", size))].rstrip() + "…"


def _num_fitting(text: Iterable[str], size: float, width: float) -> int:
    """How many of the first characters are no wider than ``width``; a name may be of any length,
    so that nothing is asked about all of it again and again."""
    widths = accumulate(size * _em(character) for character in text)
    return sum(1 for _ in takewhile(lambda wide: wide <= width, widths))


def without_beginning(name: str, size: float, width: float) -> str:
    """``name``, or as much of its end as fits into ``width`` behind an ellipsis."""
    if text_width(name, size) <= width:
        return name
    kept = max(1, _num_fitting(reversed(name), size, width - text_width("…", size)))
    return "…" + name[-kept:].lstrip(".")


def wrapped(text: str, size: float, width: float) -> list[str]:
    """``text`` in lines that are at most ``width`` wide, if its words are; none for no text."""
    broken: list[str] = []
    for word in text.split(" ") if text else ():
        longer = f"{broken[-1]} {word}" if broken else word
        if broken and text_width(longer, size) <= width:
            broken[-1] = longer
        else:
            broken.append(word)
    return [shortened(line, size, width) for line in broken]


LEGEND_SWATCH = 20.0
"""Pixels that a mark of a legend is wide."""
_LEGEND_LINE = 22.0


def legend_entries(
    entries: Iterable[tuple[str, str]], left: float, top: float, width: float
) -> tuple[list[str], float]:
    """The entries of a legend, (swatch, words) each, in as many lines as ``width`` needs, and where
    the last line ends."""
    x, y, parts = left, top, []
    for mark, words in entries:
        needed = LEGEND_SWATCH + 7 + text_width(words, 12) + 14
        if x > left and x + needed > width - left:
            x, y = left, y + _LEGEND_LINE
        place = f"translate({coordinate(x)} {coordinate(y)})"
        parts.append(tag("g", mark + write(LEGEND_SWATCH + 7, 12, words), transform=place))
        x += needed
    return parts, y + _LEGEND_LINE


def resource(name: str) -> str:
    """A style sheet or script that lies beside this module."""
    from importlib import resources  # which knows zip files and more, and no text needs

    return resources.files("penstock.drawing").joinpath(name).read_text(encoding="utf-8").strip()


def document(
    class_: str,
    size: tuple[float, float],
    words: str,
    style: str,
    parts: Iterable[str],
    definitions: str = "",
) -> str:
    """A standalone SVG document on its own ground.

    Args:
        class_: of the root, for pages that embed several kinds.
        size: width and height in pixels.
        words: what a reader who cannot see it is told.
        style: the name of its style sheet beside this module.
        parts: what is drawn.
        definitions: patterns that the parts refer to.
    """
    width, height = size
    sheet = tag("style", f"\n{resource(style)}\n")
    paper = tag("rect", class_="paper", width=width, height=height)
    return tag(
        "svg",
        f"\n{lines([sheet, definitions, paper, *parts])}\n",
        xmlns="http://www.w3.org/2000/svg",
        class_=class_,
        width=width,
        height=height,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=words,
    )


UnitName = Literal["seconds", "abstract"]

Titled: TypeAlias = "tuple[str, Timeline]"
"""A timeline and what it is called in a picture of several."""

_LONGEST_OP_SECONDS = 0.5


def title_of(timeline: Timeline) -> str:
    """The name of a timeline, and whether it was predicted or measured."""
    return f"{timeline.name or 'schedule'}, {timeline.source}"


def times_in_words(start: float, end: float, unit: TimeUnit) -> str:
    """From when to when, and how long."""
    length = end - start
    took = picture_seconds(length) if unit.suffix else unit.show(length)
    return f"{unit.show(start)} → {unit.show(end)} ({took})"


def unit_for(timelines: Sequence[Timeline], name: UnitName | None = None) -> TimeUnit:
    """The unit in which these timelines read best.

    Costs may be seconds or any unit, and a timeline does not say which. What was measured is
    seconds; a prediction is taken for seconds if all its ops are short, because costs in abstract
    units are about 1.
    """
    if name is None:
        name = "seconds" if any(map(_looks_like_seconds, timelines)) else "abstract"
    return TimeUnit() if name == "abstract" else unit_of_seconds(longest(timelines))


def longest(timelines: Sequence[Timeline]) -> float:
    """The longest makespan, which a shared axis must hold."""
    return max((timeline.makespan for timeline in timelines), default=0.0)


def _looks_like_seconds(timeline: Timeline) -> bool:
    from penstock.core.timing.spans import BUSY

    if timeline.source == "measured":
        return True
    lengths = [span.end - span.start for span in timeline.spans if span.op.kind in BUSY]
    return 0 < max(lengths, default=0.0) < _LONGEST_OP_SECONDS


def ticks(low: float, high: float, at_most: int) -> list[float]:
    """Round numbers from ``low`` to ``high``, in steps of 1, 2 or 5 times a power of ten.

    >>> ticks(0, 33, 8)
    [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]
    """
    if not high > low:
        return [low]
    rough = (high - low) / max(at_most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(k * power for k in (1, 2, 5, 10) if k * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [
        round(index * step, 12 - math.floor(math.log10(step))) for index in range(first, last + 1)
    ]


def tick_label(value: float) -> str:
    """A tick's number; ``ticks`` gives round ones, so that this is exact."""
    return f"{value or 0:.6g}"
