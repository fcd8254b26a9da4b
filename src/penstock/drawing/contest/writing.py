"""``write_contest``: the file name decides what a contest becomes."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.base.errors import InputError
from penstock.base.values import write_atomically
from penstock.drawing.contest.record import ContestRecord

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
