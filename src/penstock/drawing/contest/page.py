"""The page of a contest: what it says, the table, the losses over time, how it came about; and the
other forms that a file name asks for.
"""

from __future__ import annotations

import os
from pathlib import Path

from penstock.base.errors import InputError
from penstock.base.units import count_of
from penstock.base.values import write_atomically
from penstock.drawing.contest.curves import loss_panels
from penstock.drawing.contest.record import ContestRecord, Entry
from penstock.drawing.contest.sentences import summary
from penstock.drawing.contest.table import COLUMNS, legend, table_rows
from penstock.drawing.markup import escaped, lines, resource, tag
from penstock.drawing.timeline.html import document

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
        tag("section", tag("p", escaped(summary(record)), class_="verdict"), class_="card"),
        _table(record),
        _curves(record),
        _circumstances(record),
    ]
    return document(title, lines(parts))


def _table(record: ContestRecord) -> str:
    heads = "".join(tag("th", escaped(name), scope="col") for name in COLUMNS)
    rows = lines(
        _row(entry, cells) for entry, cells in zip(record.entries, table_rows(record), strict=True)
    )
    table = f'<table class="contest"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    return tag(
        "section",
        f"{tag('h2', 'All methods')}{tag('p', escaped(legend(record)), class_='hint')}"
        f'<div class="scroll" tabindex="0" role="region" aria-label="All methods">{table}</div>',
        class_="card",
    )


def _row(entry: Entry, cells: tuple[str, ...]) -> str:
    title = tag("th", escaped(cells[0]), scope="row")
    if not entry.ran:
        reason = tag("td", escaped(cells[1]), class_="words", colspan=len(cells) - 1)
        return tag("tr", title + reason, class_="absent")
    columns = zip(COLUMNS[1:], cells[1:], strict=True)
    figures = "".join(
        tag("td", escaped(cell), data_name=name, class_="words")
        if name == "where"
        else tag("td", _unbroken(cell), data_name=name, class_="figure")
        for name, cell in columns
    )
    return tag("tr", title + figures)


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
    listed = tag("ul", items, class_="notes") if items else ""
    return tag("section", tag("h2", "How it came about") + listed, class_="card") if items else ""


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
        from penstock.drawing.contest.page import contest_page

        return contest_page(record)
    if suffix == ".svg":
        from penstock.drawing.contest.curves import loss_panels

        return loss_panels(record)
    if suffix == ".md":
        from penstock.drawing.contest.table import markdown

        return markdown(record)
    return record.to_json()
