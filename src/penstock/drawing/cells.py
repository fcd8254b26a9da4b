"""Cells of a notebook: the picture of a value, and a few numbers above it.

Pictures are images with all their data in them. So they scale with the cell, follow its dark mode,
and are seen by whoever opens the notebook later, too: notebooks that are not trusted, and sites
that show them, take style sheets out of inline drawings, and leave images alone.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.base.units import count_of
from penstock.drawing.inputs import cluster_tables, graph_svg
from penstock.drawing.markup import Titled, escaped, lines, tag, title_of
from penstock.drawing.timeline.svg import CELL_WIDTHS, stacked

if TYPE_CHECKING:
    from penstock.core.cluster import Cluster
    from penstock.core.graph import LayerGraph
    from penstock.core.schedule.schedule import Schedule
    from penstock.core.timing.fleet_timeline import FleetTimeline
    from penstock.core.timing.timeline import Timeline
    from penstock.drawing.plan_picture import PlanPicture
    from penstock.drawing.report import Report

_WORDS = re.compile(r'aria-label="([^"]*)"')
_CELL = "margin:.25em 0"
_MUTED = "opacity:.75;font-size:.9em"
_NUMBER = "text-align:right;padding:.15em .9em .15em 0;font-variant-numeric:tabular-nums"
_TEXT = "text-align:left;padding:.15em .9em .15em 0"


def image(picture: str) -> str:
    """An SVG document as an image that is never wider than its cell."""
    match = _WORDS.search(picture)
    data = b64encode(picture.encode()).decode()
    # The words are escaped already.
    words = match[1] if match else ""
    return (
        f'<img alt="{words}" src="data:image/svg+xml;base64,{data}" '
        'style="max-width:100%;height:auto;display:block"/>'
    )


def cell(*parts: str) -> str:
    """A notebook's cell from parts that are markup already; empty ones are left out."""
    return tag("div", f"\n{lines(parts)}\n", class_="penstock", style=_CELL)


def note(text: str) -> str:
    """A line of plain text, smaller than the rest."""
    return tag("div", escaped(text), style=_MUTED) if text else ""


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int = 1) -> str:
    """A table of plain texts, in the notebook's own colours; all columns but the first
    ``num_texts`` are numbers."""

    def row(cells: Sequence[str], name: str) -> str:
        styles = [_TEXT if column < num_texts else _NUMBER for column in range(len(cells))]
        drawn = (
            tag(name, escaped(text) or " ", style=style)
            for text, style in zip(cells, styles, strict=True)
        )
        return tag("tr", "".join(drawn))

    body = lines([row(columns, "th"), *(row(cells, "td") for cells in rows)])
    return f'<table style="border-collapse:collapse">\n{body}\n</table>'


def timelines_image(timelines: Sequence[Titled], versions: bool = False) -> str:
    """Timelines on one axis, of each as much as can be read in a cell."""
    return image(stacked(timelines, width_range=CELL_WIDTHS, versions=versions, whole=False))


def timeline_cell(timeline: Timeline, versions: bool = False) -> str:
    """The picture of a timeline."""
    title = title_of(timeline)
    return cell(timelines_image([(title, timeline)], versions))


def fleet_cell(timeline: FleetTimeline) -> str:
    """The picture of a fleet's timeline."""
    from penstock.drawing.fleets import fleet_svg

    return cell(image(fleet_svg([("", timeline)])))


def schedule_cell(schedule: Schedule) -> str:
    """A schedule as it would run if F, I and W of a whole rank's layers took one unit each, and a
    message nothing."""
    from penstock.core.timing.costs import Costs
    from penstock.core.timing.simulator import simulate

    per_rank = schedule.num_stages / max(schedule.num_ranks, 1)
    timeline = simulate(schedule, Costs().spread(per_rank))
    title = f"{schedule.name or 'schedule'}, F = I = W"
    return cell(timelines_image([(title, timeline)]))


def graph_cell(graph: LayerGraph) -> str:
    """The layers of a profile as bars, below what its ``str`` says first."""
    summary, *_ = str(graph).splitlines()
    return cell(note(summary), image(graph_svg(graph)), *map(note, graph.warnings))


def cluster_cell(cluster: Cluster) -> str:
    """The devices of a cluster, and how they are joined, as tables."""
    count = count_of(len(cluster.devices), "device")
    return cell(note(count), *(table(*shown) for shown in cluster_tables(cluster)))


def plan_cell(picture: PlanPicture, timeline: Timeline) -> str:
    """A plan with its predicted timeline."""
    from penstock.drawing.plan_svg import plan_svg

    title = title_of(timeline)
    return cell(image(plan_svg(picture)), timelines_image([(title, timeline)]))


def report_cell(report: Report) -> str:
    """The numbers of a run, one step of it predicted and measured, and its losses."""
    from penstock.drawing.chart import line_chart

    facts = [(fact.label, fact.value, fact.note) for fact in report.numbers or report.facts]
    timelines = list(report.timelines().items())
    curves = [(series.name, series.points) for series in report.losses]
    return cell(
        tag("b", escaped(report.title)) if report.title else "",
        tag("p", escaped(report.headline)) if report.headline else "",
        note(report.subtitle),
        table(("", "", ""), facts, 3) if facts else "",
        timelines_image(timelines) if timelines else "",
        image(line_chart(curves, "step", "loss")) if curves else "",
    )
