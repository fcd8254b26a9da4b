"""Pictures of a timeline: text, SVG, HTML, Chrome trace. One function, ``draw``, for all of them;
``stacked`` for several timelines on one axis, ``write_report`` for a whole training run."""

from penstock.drawing.draw import draw
from penstock.drawing.report import read_report, write_report
from penstock.drawing.run_report import Fact, Report, Series, StageRow, TimelineRecord
from penstock.drawing.svg import stacked

__all__ = [
    "Fact",
    "Report",
    "Series",
    "StageRow",
    "TimelineRecord",
    "draw",
    "read_report",
    "stacked",
    "write_report",
]
