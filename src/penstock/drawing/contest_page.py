"""The page of a contest: its sentences, the table, the losses over time, how it came about; and the
other forms that a file name asks for.

Losses are small multiples: in each panel one method is dark and all others are pale, since a dozen
lines in one plot cannot be told apart by colour. All panels have one scale, so that heights and
lengths can be compared between them.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.base.errors import InputError
from penstock.base.units import count_of, unit_of_seconds
from penstock.base.values import write_atomically
from penstock.drawing.contest import (
    COLUMNS,
    ContestRecord,
    Entry,
    doubts,
    legend,
    markdown,
    sentences,
    table_rows,
)
from penstock.drawing.markup import (
    coordinate,
    document,
    escaped,
    lines,
    resource,
    shortened,
    tag,
    tick_label,
    ticks,
    write,
)
from penstock.drawing.pages import card, html_document, scrolled_table

_WIDE_COLUMNS, _NARROW_COLUMNS = 5, 2
"""Panels beside each other on a wide screen and on a narrow one."""


def contest_page(record: ContestRecord) -> str:
    """Draw a contest as a self-contained HTML page."""
    title = f"{record.title}: a contest of methods"
    subtitle = (
        f"{count_of(len(record.entries), 'method')}, up to "
        f"{count_of(record.num_devices, 'device')}, "
        f"{count_of(record.num_microbatches, 'microbatch', 'es')}, "
        f"{count_of(record.num_steps, 'minibatch', 'es')} each, in turns"
    )
    head = tag("h1", escaped(title)) + tag("p", escaped(subtitle), class_="subtitle")
    parts = [
        tag("style", f"\n{resource('contest_page.css')}\n"),
        f"<header>{head}</header>",
        tag("section", _verdict(record), class_="card"),
        _table(record),
        _curves(record),
        _circumstances(record),
    ]
    return html_document(title, lines(parts))


def _verdict(record: ContestRecord) -> str:
    """The sentences, grey where other programs disturbed what they tell of."""
    said = (
        tag("span", escaped(str(sentence)), class_="doubtful")
        if sentence.doubt
        else escaped(sentence.text)
        for sentence in sentences(record)
    )
    return tag("p", " ".join(said), class_="verdict")


def _table(record: ContestRecord) -> str:
    heads = "".join(tag("th", escaped(name), scope="col") for name in COLUMNS)
    rows = lines(
        _row(entry, cells, doubts(record, entry))
        for entry, cells in zip(record.entries, table_rows(record), strict=True)
    )
    table = scrolled_table("All methods", f"<tr>{heads}</tr>", rows, "contest")
    return card("All methods", table, escaped(legend(record)))


def _row(entry: Entry, cells: tuple[str, ...], doubted: Mapping[str, str]) -> str:
    title = tag("th", escaped(cells[0]), scope="row")
    if not entry.ran:
        reason = tag("td", escaped(cells[1]), class_="words", colspan=len(cells) - 1)
        return tag("tr", title + reason, class_="absent")
    columns = zip(COLUMNS[1:], cells[1:], strict=True)
    return tag("tr", title + "".join(_cell(*column, doubted) for column in columns))


def _cell(name: str, text: str, doubted: Mapping[str, str]) -> str:
    if name == "where":
        return tag("td", escaped(text), data_name=name, class_="words")
    if name not in doubted:
        return tag("td", _unbroken(text), data_name=name, class_="figure")
    style = "figure doubtful"
    return tag("td", _unbroken(text), data_name=name, class_=style, title=doubted[name])


def _unbroken(cell: str) -> str:
    """A cell in which no number leaves its unit; a measured figure may go below its prediction."""
    return escaped(cell).replace(" ", "&nbsp;").replace("→&nbsp;", "→ ").replace(",&nbsp;", ", ")


def _curves(record: ContestRecord) -> str:
    if not any(len(entry.curve()) > 1 for entry in record.finished):
        return ""
    hint = (
        "A panel for each method: it is dark, all others are pale. Blue computes what one device "
        "computes; orange learns from gradients that are some updates old."
    )
    wide = f'<div class="wide">{loss_panels(record, _WIDE_COLUMNS)}</div>'
    narrow = f'<div class="narrow">{loss_panels(record, _NARROW_COLUMNS)}</div>'
    name = record.loss_name.capitalize()
    head = tag("h2", escaped(f"{name} over time")) + tag("p", escaped(hint), class_="hint")
    return tag("section", head + wide + narrow, class_="card panels")


def _circumstances(record: ContestRecord) -> str:
    items = "".join(tag("li", escaped(note)) for note in record.notes)
    return card("How it came about", tag("ul", items, class_="notes")) if items else ""


_KINDS = (".html", ".svg", ".md", ".json")


def check_output(path: str | os.PathLike[str]) -> str:
    """The suffix of a file that a contest can be written to.

    Raises:
        InputError: it is none of ``.html``, ``.svg``, ``.md`` and ``.json``, or the folder is not
            there.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _KINDS:
        raise InputError(f"cannot write {str(path)!r}: end the name in {', '.join(_KINDS)}")
    if not Path(path).absolute().parent.is_dir():
        raise InputError(f"cannot write {str(path)!r}: the folder is not there; make it first")
    return suffix


def write_contest(record: ContestRecord, path: str | os.PathLike[str]) -> None:
    """Write a contest as a page (``.html``), its curves (``.svg``), a table (``.md``) or itself
    (``.json``).

    Raises:
        InputError: another suffix, or a folder that is not there.
        FileError: the file cannot be written.
    """
    write_atomically(path, _drawn(record, check_output(path)).rstrip("\n") + "\n")


def _drawn(record: ContestRecord, suffix: str) -> str:
    if suffix == ".html":
        return contest_page(record)
    if suffix == ".svg":
        return loss_panels(record)
    if suffix == ".md":
        return markdown(record)
    return record.to_json()


Point = tuple[float, float]

_PANEL_WIDTH, _PANEL_HEIGHT = 176.0, 104.0
_LEFT, _TOP, _GAP_X, _GAP_Y, _FOOT = 44.0, 40.0, 22.0, 46.0, 24.0


_MOST_MEDIANS = 2.0
"""How many times the median method's time is shown."""


class _Scale(NamedTuple):
    """From seconds and losses to pixels of a panel."""

    seconds: float
    low: float
    high: float

    def place(self, point: Point, left: float, top: float) -> Point:
        x = left + point[0] / self.seconds * _PANEL_WIDTH
        y = top + (self.high - point[1]) / (self.high - self.low) * _PANEL_HEIGHT
        return x, y


def loss_panels(record: ContestRecord, columns: int = 4) -> str:
    """Draw the curves of all methods that ran as a standalone SVG document.

    Args:
        columns: panels beside each other, at least 1.
    """
    shown = [entry for entry in record.finished if len(entry.curve()) > 1]
    columns = max(1, min(columns, len(shown) or 1))
    rows = -(-len(shown) // columns)
    width = _LEFT + columns * (_PANEL_WIDTH + _GAP_X)
    height = _TOP + rows * (_PANEL_HEIGHT + _GAP_Y) + _FOOT
    scale = _scale(shown)
    panels = []
    for index, entry in enumerate(shown):
        left = _LEFT + index % columns * (_PANEL_WIDTH + _GAP_X)
        top = _TOP + index // columns * (_PANEL_HEIGHT + _GAP_Y)
        panels.append(_panel(entry, shown, scale, (left, top), first=index % columns == 0))
    unit = unit_of_seconds(scale.seconds).suffix
    foot = f"horizontal: {unit} of training; vertical: {record.loss_name}"
    if record.target is not None:
        foot += f"; dashed: the target, {record.target:.4g}"
    texts = [write(8, height - 10, foot, "muted")]
    marks = [_target(record.target, scale, rows, columns, len(shown))]
    words = f"{record.loss_name} over time: {', '.join(entry.title for entry in shown)}"
    return document("chart", (width, height), words, "contest.css", [*marks, *panels, *texts])


def _scale(entries: Sequence[Entry]) -> _Scale:
    points = [point for entry in entries for point in entry.curve()]
    low = min((loss for _, loss in points), default=0.0)
    # A method that diverges must not press all others flat.
    starts = [entry.curve()[0][1] for entry in entries]
    high = max(starts, default=1.0)
    room = 0.06 * (high - low) or 0.5
    ends = [entry.curve()[-1][0] for entry in entries]
    # Nor must one that takes very long press all others into a corner: its line is cut.
    seconds = min(max(ends), _MOST_MEDIANS * statistics.median(ends)) if ends else 1.0
    return _Scale(seconds, low - room, high + room)


def _within(curve: Sequence[Point], seconds: float) -> list[Point]:
    """A curve up to a time, where it is cut between two points."""
    kept = [point for point in curve if point[0] <= seconds]
    if len(kept) < len(curve):
        (begin, before), (end, after) = kept[-1], curve[len(kept)]
        share = (seconds - begin) / (end - begin)
        kept.append((seconds, before + share * (after - before)))
    return kept


def _panel(
    entry: Entry, others: Sequence[Entry], scale: _Scale, corner: Point, *, first: bool
) -> str:
    left, top = corner
    frame = tag("rect", class_="frame", x=left, y=top, width=_PANEL_WIDTH, height=_PANEL_HEIGHT)
    pale = [_path(other, scale, corner, "pale") for other in others if other is not entry]
    last = entry.curve()[-1]
    end = scale.place(last, left, top)
    dark = _path(entry, scale, corner, "dark" if entry.synchronous else "late")
    style = "dot" if entry.synchronous else "dot late"
    ends = last[0] <= scale.seconds
    dot = tag("circle", class_=style, cx=end[0], cy=max(top, end[1]), r=3) if ends else ""
    title = write(left, top - 8, shortened(entry.title, 12, _PANEL_WIDTH), "name")
    return lines([frame, *pale, dark, dot, title, _axis(scale, corner, first=first)])


def _path(entry: Entry, scale: _Scale, corner: Point, style: str) -> str:
    places = [scale.place(point, *corner) for point in _within(entry.curve(), scale.seconds)]
    drawn = "M" + "L".join(f"{coordinate(x)} {coordinate(max(corner[1], y))}" for x, y in places)
    return tag("path", class_=style, d=drawn)


def _axis(scale: _Scale, corner: Point, *, first: bool) -> str:
    left, top = corner
    unit = unit_of_seconds(scale.seconds)
    parts = []
    for value in ticks(0, scale.seconds * unit.factor, 3):
        x, _ = scale.place((value / unit.factor, scale.low), left, top)
        parts.append(
            write(x, top + _PANEL_HEIGHT + 14, tick_label(value), "muted", text_anchor="middle")
        )
    if first:
        for value in ticks(scale.low, scale.high, 4):
            _, y = scale.place((0, value), left, top)
            parts.append(write(left - 6, y + 4, tick_label(value), "muted", text_anchor="end"))
    return lines(parts)


def _target(target: float | None, scale: _Scale, rows: int, columns: int, count: int) -> str:
    if target is None or not scale.low <= target <= scale.high:
        return ""
    parts = []
    for index in range(count):
        left = _LEFT + index % columns * (_PANEL_WIDTH + _GAP_X)
        top = _TOP + index // columns * (_PANEL_HEIGHT + _GAP_Y)
        _, y = scale.place((0, target), left, top)
        parts.append(tag("path", class_="target", d=f"M{left:g} {y:.2f}h{_PANEL_WIDTH:g}"))
    return lines(parts)
