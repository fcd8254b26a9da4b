"""The words of a plan's figure: wrapped lines, names of layers, the legend, the other choices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from typing import NamedTuple

from penstock.drawing.layer_names import first_to_last, how_many
from penstock.drawing.markup import (
    coordinate,
    lines,
    num_fitting,
    shortened,
    tag,
    text_width,
    write,
)
from penstock.drawing.plan.picture import Choices

_SWATCH, _LINE_HEIGHT = 20.0, 22.0
_SIZE, _BETWEEN = 11.5, 16.0
_LEAST = 90.0


class Drawn(NamedTuple):
    """Markup, and where it ends."""

    markup: str
    bottom: float


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


def shortened_layers(names: Sequence[str], size: float, width: float) -> str:
    """The first and last layer and how many, in at most ``width``. Names give up their beginnings,
    because layers of one model differ at their ends."""
    if len(names) == 1:
        return without_beginning(names[0], size, width)
    if text_width(first_to_last(names), size) <= width:
        return first_to_last(names)
    count = how_many(names)
    each = (width - text_width(f" … {count}", size)) / 2
    first, last = (without_beginning(name, size, each) for name in (names[0], names[-1]))
    return f"{first} … {last}{count}"


def without_beginning(name: str, size: float, width: float) -> str:
    """``name``, or as much of its end as fits into ``width`` behind an ellipsis."""
    if text_width(name, size) <= width:
        return name
    kept = max(1, num_fitting(reversed(name), size, width - text_width("…", size)))
    return "…" + name[-kept:].lstrip(".")


def legend_lines(
    rows: Iterable[Iterable[tuple[str, str]]], left: float, top: float, width: float
) -> Iterator[Drawn]:
    """Rows of (swatch, words), each in as many lines as its width needs."""
    for entries in rows:
        x, parts = left, []
        for mark, words in entries:
            needed = _SWATCH + 7 + text_width(words, 12) + 14
            if x > left and x + needed > width - left:
                x, top = left, top + _LINE_HEIGHT
            place = f"translate({coordinate(x)} {coordinate(top)})"
            parts.append(tag("g", mark + write(_SWATCH + 7, 12, words), transform=place))
            x += needed
        if parts:
            top += _LINE_HEIGHT
            yield Drawn(tag("g", lines(parts), class_="legend"), top)


def choices_table(choices: Choices, left: float, top: float, width: float) -> Drawn:
    """What else could have been done, as a table; words give way where it is too wide."""
    rows = (choices.columns, *choices.rows)
    widths = _column_widths(choices, rows, width)
    parts, rules = [], ""
    for index, row in enumerate(rows):
        x, deepest = left, 1
        for column, (cell, room) in enumerate(zip(row, widths, strict=True)):
            text = choices.is_text(column)
            told = wrapped(cell, _SIZE, room) if text else [cell]
            deepest = max(deepest, len(told))
            class_ = "muted small" if index == 0 else _style(choices, index - 1, column)
            end = x if text else x + room
            anchor = {} if text else {"text_anchor": "end"}
            parts += [
                write(end, top + 14 + 15 * number, line, class_, **anchor)
                for number, line in enumerate(told)
                if line
            ]
            x += room + _BETWEEN
        top += 7 + 15 * deepest
        rules += f"M{coordinate(left)} {coordinate(top)}h{coordinate(width)}"
    return Drawn(lines([*parts, tag("path", class_="rule", d=rules)]), top)


def _style(choices: Choices, row: int, column: int) -> str:
    return "strong small" if row == choices.chosen or column == 0 else "small"


def _column_widths(choices: Choices, rows: Sequence[Sequence[str]], width: float) -> list[float]:
    """The width of each column; those of words shrink by the same share until all fit."""
    wanted = [
        max(text_width(cell, _SIZE * 1.04) for cell in cells) for cells in zip(*rows, strict=True)
    ]
    shrinks = [column > 0 and choices.is_text(column) for column in range(len(wanted))]
    room = width - _BETWEEN * (len(wanted) - 1)
    words = sum(compress(wanted, shrinks))
    numbers = sum(own for own, does in zip(wanted, shrinks, strict=True) if not does)
    share = min(1.0, max(room - numbers, _LEAST) / words) if words else 1.0
    return [own * share if does else own for own, does in zip(wanted, shrinks, strict=True)]
