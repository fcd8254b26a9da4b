"""The page of a report: what came of it, one step predicted and measured, loss, plan, memory.

It begins with one sentence and three numbers, and then answers in the order in which people ask:
where did the time go, is the loss the same, what was run, what did it take, how do I get it again.
A report is a folder with this page, its pictures, and ``run.json``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from penstock.base.errors import InputError, ScheduleError
from penstock.base.units import picture_bytes, picture_seconds
from penstock.base.values import write_atomically
from penstock.core.timing import find_parting
from penstock.core.timing.timeline import Timeline
from penstock.drawing.axes import UnitName
from penstock.drawing.chart import line_chart
from penstock.drawing.layer_names import first_to_last
from penstock.drawing.markup import escaped, lines, tag
from penstock.drawing.report.run_report import Fact, Report, Series, StageRow
from penstock.drawing.report.sections import (
    IDLE_HINT,
    explained,
    glossary,
    idle_table,
    taking_section,
)
from penstock.drawing.report.words import departure
from penstock.drawing.timeline.html import document, scroll, viewer
from penstock.drawing.timeline.svg import PAGE_WIDTHS, stacked, svg

TIMELINES_UNIT: UnitName = "seconds"
"""A report is of a run, so that its times are seconds, also the predicted ones."""

_MOST_LAYERS = 3


def report_page(report: Report) -> str:
    """Draw a report as a self-contained HTML page."""
    pair = lines([_losses(report.losses), _memory(report.stages)])
    parts = [
        _head(report),
        _facts(report.numbers, "facts three"),
        _timelines(report.timelines()),
        _idle(report.timelines()),
        f'<div class="pair">\n{pair}\n</div>' if pair else "",
        _plan(report),
        _more(report),
        taking_section(report),
        glossary() if report.facts or report.numbers else "",
        "<footer>Drawn by Penstock. Everything on this page is in run.json beside it.</footer>",
    ]
    return document(report.title, lines(parts))


def _head(report: Report) -> str:
    subtitle = tag("p", escaped(report.subtitle), class_="subtitle") if report.subtitle else ""
    headline = tag("p", explained(report.headline), class_="headline") if report.headline else ""
    return f"<header>{tag('h1', escaped(report.title) or ' ')}{headline}{subtitle}</header>"


def _section(title: str, hint: str, body: str) -> str:
    head = tag("h2", escaped(title)) + (tag("p", explained(hint), class_="hint") if hint else "")
    return f'<section class="card">\n{head}\n{body}\n</section>'


def _facts(facts: Sequence[Fact], class_: str = "facts") -> str:
    if not facts:
        return ""
    return f'<dl class="{class_}">\n{lines(map(_fact, facts))}\n</dl>'


def _fact(fact: Fact) -> str:
    note = f'<dd class="note">{explained(fact.note)}</dd>' if fact.note else ""
    value = f'<dd class="value">{escaped(fact.value)}</dd>'
    class_ = "card doubtful" if fact.doubtful else "card"
    return f'<div class="{class_}"><dt>{explained(fact.label)}</dt>{value}{note}</div>'


def _more(report: Report) -> str:
    """All numbers: in sight where there are no three that stand for them."""
    if not report.facts:
        return ""
    numbers = f"<h2>All numbers</h2>\n{_facts(report.facts)}"
    return f'<section class="numbers">\n{numbers}\n</section>'


def _timelines(timelines: dict[str, Timeline]) -> str:
    if not timelines:
        return ""
    names = " and ".join(timelines).lower()
    picture = stacked(timelines, unit=TIMELINES_UNIT, width_range=PAGE_WIDTHS)
    hint = "Both share one time axis. " if len(timelines) > 1 else ""
    return _section(
        f"One step, {names}",
        f"{hint}A row per rank; what is empty is idle.{_departure(timelines)}",
        viewer(picture, f"Timeline, {names}"),
    )


def _departure(timelines: dict[str, Timeline]) -> str:
    """Where the measured step parts from the predicted one, if both show the same schedule."""
    if len(timelines) < 2:
        return ""
    try:
        predicted, measured = timelines.values()
        return f" {departure(find_parting(predicted, measured))}"
    except InputError:
        return ""


def _idle(timelines: dict[str, Timeline]) -> str:
    try:
        table = idle_table(timelines)
    except (InputError, ScheduleError):
        # Parts of a step, or of two different jobs: nobody can say what their ops waited for.
        return ""
    return _section("Where the idle time comes from", IDLE_HINT, table) if table else ""


def _losses(series: Sequence[Series]) -> str:
    if not series:
        return ""
    chart = line_chart([(curve.name, curve.points) for curve in series], "step", "loss")
    return _section("Loss", "", scroll(chart, "Loss curves"))


def _plan(report: Report) -> str:
    printed = f'<div class="scroll" tabindex="0"><pre>{escaped(report.plan_text)}</pre></div>'
    if not report.stages:
        return _section("Plan", "", printed) if report.plan_text else ""
    table = _table(report.stages)
    if report.plan_text:
        table += f"\n<details><summary>The plan as printed</summary>{printed}</details>"
    return _section("Plan", "Times are per microbatch; memory is at its peak.", table)


_COLUMNS = (
    "rank",
    "forward",
    "backward",
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "in flight",
    "total",
)


def _table(stages: Sequence[StageRow]) -> str:
    names = "".join(f'<th scope="col">{explained(name)}</th>' for name in _COLUMNS)
    head = f'<tr><th scope="col">stage</th><th scope="col" class="words">layers</th>{names}</tr>'
    rows = lines(_table_row(index, stage) for index, stage in enumerate(stages))
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Plan">\n'
        f'<table class="stacking">\n<thead>{head}</thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n'
        "</div>"
    )


def _table_row(index: int, stage: StageRow) -> str:
    cells = [
        str(stage.rank),
        picture_seconds(stage.forward_seconds),
        picture_seconds(stage.backward_seconds),
        *(picture_bytes(amount) for _, amount in stage.memory),
        f"{stage.peak_activations:.3g}",
        picture_bytes(stage.memory_bytes),
    ]
    # A phone shows a row as a list, in which each cell says what it is.
    numbers = "".join(
        tag("td", escaped(cell), data_name=name) for name, cell in zip(_COLUMNS, cells, strict=True)
    )
    number = tag("th", str(index), scope="row", data_name="stage")
    return f"<tr>{number}{_layers(stage.layers)}{numbers}</tr>"


def _layers(names: Sequence[str]) -> str:
    """The first and last layer and how many; all of them on hover."""
    shown = first_to_last(names) if len(names) > _MOST_LAYERS else ", ".join(names)
    return tag("td", escaped(shown) or " ", class_="words", title=", ".join(names))


def _memory(stages: Sequence[StageRow]) -> str:
    most = max((stage.memory_bytes for stage in stages), default=0)
    if not most:
        return ""
    rows = lines(_memory_row(index, stage, most) for index, stage in enumerate(stages))
    return _section(
        "Memory per stage",
        "At the peak, predicted from the profile. All bars have one scale.",
        f'<ul class="memory">\n{rows}\n</ul>',
    )


def _memory_row(index: int, stage: StageRow, most: int) -> str:
    segments, numbers = "", ""
    for style, (name, amount) in enumerate(stage.memory):
        words = f"{name} {picture_bytes(amount)}"
        numbers += f'<span><i class="key m{style}"></i>{words}</span>'
        if amount:
            share = f"{100 * amount / most:.3g}"
            segments += f'<i class="m{style}" style="width:{share}%" title="{words}"></i>'
    total = f"<b>{picture_bytes(stage.memory_bytes)}</b>"
    return (
        f'<li><div class="head"><span>stage {index}, rank {stage.rank}</span>{total}</div>'
        f'<div class="stack">{segments}</div><div class="parts">{numbers}</div></li>'
    )


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
