"""Pictures of a timeline: text, SVG, PDF, PNG, HTML, Chrome trace. One function, ``draw``, for all
of them; ``compare`` for several beside each other, as a value. ``draw_plan`` for a plan with its
timeline, ``draw_stacked`` for several timelines on one axis, ``draw_scatter`` for memory against
bubble, ``draw_memory`` for memory over time, ``draw_borrowed`` for two ticks of PARTIME,
``draw_fleets`` for many models on few devices, ``write_report`` for a whole training run.

Figures are SVG; ``rendering`` makes PDF and PNG of them, ``cells`` what a notebook shows of values
of any room: they name the function that draws them, and load it when they are looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.base.lazily import loaded_when_used

if TYPE_CHECKING:
    from penstock.drawing.comparison import Comparison, compare
    from penstock.drawing.formats import (
        draw,
        draw_borrowed,
        draw_fleets,
        draw_memory,
        draw_plan,
        draw_scatter,
        draw_stacked,
    )
    from penstock.drawing.plan_picture import PlanPicture
    from penstock.drawing.report import Fact, Report, Series, StageRow, TimelineRecord
    from penstock.drawing.report_page import read_report, write_report
    from penstock.drawing.timeline.svg import stacked
else:
    __getattr__ = loaded_when_used(
        __name__,
        {
            "penstock.drawing.comparison": ("Comparison", "compare"),
            "penstock.drawing.formats": (
                "draw",
                "draw_borrowed",
                "draw_fleets",
                "draw_memory",
                "draw_plan",
                "draw_scatter",
                "draw_stacked",
            ),
            "penstock.drawing.plan_picture": ("PlanPicture",),
            "penstock.drawing.report": (
                "Fact",
                "Report",
                "Series",
                "StageRow",
                "TimelineRecord",
            ),
            "penstock.drawing.report_page": ("read_report", "write_report"),
            "penstock.drawing.timeline.svg": ("stacked",),
        },
    )

__all__ = [
    "Comparison",
    "Fact",
    "PlanPicture",
    "Report",
    "Series",
    "StageRow",
    "TimelineRecord",
    "compare",
    "draw",
    "draw_borrowed",
    "draw_fleets",
    "draw_memory",
    "draw_plan",
    "draw_scatter",
    "draw_stacked",
    "read_report",
    "stacked",
    "write_report",
]
