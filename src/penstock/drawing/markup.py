"""The few words of SVG and HTML that the pictures are written in."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from itertools import accumulate, takewhile

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
    return text[: num_fitting(text, size, width - text_width("…", size))].rstrip() + "…"


def num_fitting(text: Iterable[str], size: float, width: float) -> int:
    """How many of the first characters are no wider than ``width``; a name may be of any length,
    so that nothing is asked about all of it again and again."""
    widths = accumulate(size * _em(character) for character in text)
    return sum(1 for _ in takewhile(lambda wide: wide <= width, widths))


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
