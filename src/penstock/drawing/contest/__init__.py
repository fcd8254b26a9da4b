"""A contest of methods as a value, a table and a page.

``record`` is what a contest found, ``standings`` what follows from it, ``table`` its cells,
``sentences`` what it says, ``curves`` the loss of every method over time, ``page`` and
``writing`` the files.

Decisions:

Losses are drawn as small multiples: in each panel one method is dark and all others are pale, since
a dozen lines in one plot cannot be told apart by colour. A method that did not run keeps its row,
with the reason, because what is impossible here is an answer, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.base.lazily import loaded_when_used

if TYPE_CHECKING:
    from penstock.drawing.contest.page import check_output, write_contest
    from penstock.drawing.contest.record import ContestRecord, Entry, LossPoint
    from penstock.drawing.contest.sentences import summary
    from penstock.drawing.contest.table import COLUMNS, legend, markdown, table_rows
else:
    __getattr__ = loaded_when_used(
        __name__,
        {
            "penstock.drawing.contest.record": ("ContestRecord", "Entry", "LossPoint"),
            "penstock.drawing.contest.sentences": ("summary",),
            "penstock.drawing.contest.table": ("COLUMNS", "legend", "markdown", "table_rows"),
            "penstock.drawing.contest.page": ("check_output", "write_contest"),
        },
    )

__all__ = [
    "COLUMNS",
    "ContestRecord",
    "Entry",
    "LossPoint",
    "check_output",
    "legend",
    "markdown",
    "summary",
    "table_rows",
    "write_contest",
]
