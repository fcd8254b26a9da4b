"""``write_report``: a training run as a folder with a page, its pictures, and ``run.json``.

The page can be drawn again from ``run.json`` alone, on another day and by a newer Penstock.
"""

from __future__ import annotations

import os
from pathlib import Path

from penstock.base.values import write_atomically
from penstock.drawing.report.page import TIMELINES_UNIT, report_page
from penstock.drawing.report.run_report import Report
from penstock.drawing.timeline.svg import stacked, svg

RUN_FILE = "run.json"


def write_report(report: Report, folder: str | os.PathLike[str]) -> Path:
    """Write a report into a folder, which is made if need be.

    ``index.html`` needs no other file and no network. ``predicted.svg``, ``measured.svg`` and
    ``timelines.svg`` (both on one time axis) are for papers and slides. Each file appears whole or
    not at all.

    Returns:
        The path of the page.

    Raises:
        FileError: the folder cannot be written.
    """
    target, timelines = Path(folder), report.timelines()
    for title, timeline in timelines.items():
        picture = svg(timeline, unit=TIMELINES_UNIT)
        write_atomically(target / f"{title.lower()}.svg", picture + "\n")
    if timelines:
        write_atomically(target / "timelines.svg", stacked(timelines, unit=TIMELINES_UNIT) + "\n")
    report.save(target / RUN_FILE)
    write_atomically(target / "index.html", report_page(report) + "\n")
    return target / "index.html"


def read_report(folder: str | os.PathLike[str]) -> Report:
    """Read back what ``write_report`` wrote into a folder; also takes the path of ``run.json``.

    Raises:
        FileError: there is no report, or it has an unknown key, a missing one or a wrong type.
    """
    path = Path(folder)
    # os.path.isdir takes any name; Path.is_dir raises for one that is too long.
    return Report.load(path / RUN_FILE if os.path.isdir(path) else path)
