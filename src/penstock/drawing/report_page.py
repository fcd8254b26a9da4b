"""The page of a report: what came of it, one step predicted and measured, loss, plan, memory.

It begins with one sentence and three numbers, and then answers in the order in which people ask:
where did the time go, is the loss the same, what was run, what did it take, how do I get it again.
A report is a folder with this page, its pictures, and ``run.json``.
"""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.base.errors import InputError, ScheduleError
from penstock.base.units import picture_bytes, picture_seconds
from penstock.base.values import write_atomically
from penstock.core.timing import Idle, find_parting, idle_of
from penstock.core.timing.timeline import Timeline
from penstock.drawing.chart import line_chart
from penstock.drawing.markup import UnitName, escaped, lines, tag
from penstock.drawing.pages import card, html_document, scroll, scrolled_table, viewer
from penstock.drawing.plan_picture import first_to_last
from penstock.drawing.report import Fact, Report, Series, StageRow, departure
from penstock.drawing.timeline.svg import PAGE_WIDTHS, stacked, svg

_MOST_BYTES = 2_000_000
"""A larger file is not put into the page as well; it lies beside it."""


def _taking_section(report: Report) -> str:
    """A section with a button for the command and links to files; nothing where a report has
    none."""
    if not (report.command or report.plan_json or report.losses):
        return ""
    files = {
        "plan.json": ("the plan", report.plan_json),
        "losses.csv": ("the losses", _as_csv(report)),
        "run.json": ("everything on this page", report.to_json()),
    }
    links = [
        _link(name, words, content)
        for name, (words, content) in files.items()
        if content and len(content) <= _MOST_BYTES
    ]
    command = ""
    if report.command:
        button = tag("button", "Copy", type="button", data_copy=report.command)
        command = (
            f'<div class="command"><div class="scroll" tabindex="0"><pre>{escaped(report.command)}'
            f"</pre></div>{button}</div>"
        )
    body = f'{command}\n<p class="files">{" · ".join(links)}</p>'
    return card("Again, or elsewhere", body)


def _link(name: str, words: str, content: str) -> str:
    kind = "text/csv" if name.endswith(".csv") else "application/json"
    data = b64encode(content.encode()).decode()
    address = f"data:{kind};base64,{data}"
    return tag("a", f"{escaped(words)} ({escaped(name)})", href=address, download=name)


def _as_csv(report: Report) -> str:
    """A line per step, a column per curve; empty where a curve has no value."""
    curves = [dict(series.points) for series in report.losses]
    if not curves:
        return ""
    names = ['"' + series.name.replace('"', '""') + '"' for series in report.losses]
    steps = sorted({step for curve in curves for step in curve})
    rows = [
        [str(step), *("" if curve.get(step) is None else repr(curve[step]) for curve in curves)]
        for step in steps
    ]
    return "\n".join(",".join(row) for row in [["step", *names], *rows]) + "\n"


WORDS: Mapping[str, str] = {
    "activations": "what a forward keeps for its backward; most of a stage's memory comes and goes "
    "with them",
    "bubble": "the share of the devices' time in which they do nothing, since the order of work "
    "leaves gaps",
    "held-out": "measured on data that is never trained on",
    "in flight": "microbatches whose forward is done on a rank, and whose backward is not",
    "makespan": "from the first op's start to the last op's end",
    "median": "half of the steps took longer, half less",
    "microbatch": "a part of a minibatch that goes through the stages on its own; weights change "
    "only after all of them",
    "minibatch": "the rows after which the weights change",
    "optimizer": "what it remembers about each weight, as Adam's two averages",
    "rank": "a device, or the worker that has one",
    "stage bubble": "the same share, of each rank's time from its first op to its last only",
    "stage": "consecutive layers on one device",
    "throughput": "how much is trained per second",
}
"""Words by how they stand in the page, lower case; each meaning is part of a sentence."""

# Longer ones first, so that a stage bubble is no stage.
_ANY = re.compile(
    r"\b(" + "|".join(map(re.escape, sorted(WORDS, key=len, reverse=True))) + r")(e?s)?\b"
)


def explained(text: str) -> str:
    """Plain text as markup, in which each known word says under the pointer what it means."""

    def abbreviation(match: re.Match[str]) -> str:
        return tag("abbr", match[0], title=f"{match[1]}: {WORDS[match[1]]}")

    return _ANY.sub(abbreviation, escaped(text))


def glossary() -> str:
    """All words, for those who cannot point, in a list that is closed at first."""
    entries = lines(
        f"<div><dt>{escaped(word)}</dt><dd>{escaped(meaning)}</dd></div>"
        for word, meaning in WORDS.items()
    )
    summary = "<summary>What the words on this page mean</summary>"
    return f'<details class="card words-list">{summary}\n<dl>\n{entries}\n</dl>\n</details>'


_IDLE_HINT = (
    "Bubble: what the schedule's order forces. Waiting: what slow ops and late starts of other "
    "ranks add. Communication: what messages add beyond what compute hides. All bars have one "
    "scale."
)

_STYLES = {"bubble": "m1", "waiting": "m2", "communication": "m0"}


def _idle_table(timelines: Mapping[str, Timeline]) -> str:
    """Bars and numbers of every rank for timelines by title; nothing where no rank is idle.

    Args:
        timelines: of as many ranks.

    Raises:
        InputError: they have different numbers of ranks.
        ScheduleError: a timeline lacks ops that others need.
    """
    if len({timeline.num_ranks for timeline in timelines.values()}) > 1:
        raise InputError("the timelines have different numbers of ranks; draw each by itself")
    split = {title: idle_of(timeline) for title, timeline in timelines.items()}
    most = max((idle.total for ranks in split.values() for idle in ranks), default=0.0)
    if not most:
        return ""
    keys = "".join(
        f'<th scope="col"><i class="key {style}"></i>{name}</th>' for name, style in _STYLES.items()
    )
    head = '<th scope="col">rank</th><th class="words" colspan="2"></th><th scope="col">idle</th>'
    by_rank = zip(*split.values(), strict=True)
    rows = lines(
        _rows(rank, dict(zip(split, row, strict=True)), most) for rank, row in enumerate(by_rank)
    )
    return scrolled_table("Idle time", f"<tr>{head}{keys}</tr>", rows, "idle")


def _rows(rank: int, idle: Mapping[str, Idle], most: float) -> str:
    """A rank's rows, under one number."""
    number = f'<th scope="rowgroup" rowspan="{len(idle)}">{rank}</th>'
    first, *others = (_cells(title, part, most) for title, part in idle.items())
    return lines(f"<tr>{row}</tr>" for row in (number + first, *others))


def _cells(title: str, idle: Idle, most: float) -> str:
    segments = ""
    for (name, style), part in zip(_STYLES.items(), idle, strict=True):
        width = f"{100 * part / most:.3g}%"
        words = f"{name} {picture_seconds(part)}"
        segments += f'<i class="{style}" style="width:{width}" title="{words}"></i>' if part else ""
    numbers = "".join(tag("td", escaped(picture_seconds(part))) for part in (idle.total, *idle))
    return (
        f'<td class="step">{escaped(title.lower())}</td>'
        f'<td class="wide"><div class="stack">{segments}</div></td>{numbers}'
    )


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
        _taking_section(report),
        glossary() if report.facts or report.numbers else "",
        "<footer>Drawn by Penstock. Everything on this page is in run.json beside it.</footer>",
    ]
    return html_document(report.title, lines(parts))


def _head(report: Report) -> str:
    subtitle = tag("p", escaped(report.subtitle), class_="subtitle") if report.subtitle else ""
    headline = tag("p", explained(report.headline), class_="headline") if report.headline else ""
    return f"<header>{tag('h1', escaped(report.title) or ' ')}{headline}{subtitle}</header>"


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
    hint += f"A row per rank; what is empty is idle.{_departure(timelines)}"
    return card(f"One step, {names}", viewer(picture, f"Timeline, {names}"), explained(hint))


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
        table = _idle_table(timelines)
    except (InputError, ScheduleError):
        # Parts of a step, or of two different jobs: nobody can say what their ops waited for.
        return ""
    return card("Where the idle time comes from", table, explained(_IDLE_HINT)) if table else ""


def _losses(series: Sequence[Series]) -> str:
    if not series:
        return ""
    chart = line_chart([(curve.name, curve.points) for curve in series], "step", "loss")
    return card("Loss", scroll(chart, "Loss curves"))


def _plan(report: Report) -> str:
    printed = f'<div class="scroll" tabindex="0"><pre>{escaped(report.plan_text)}</pre></div>'
    if not report.stages:
        return card("Plan", printed) if report.plan_text else ""
    table = _table(report.stages)
    if report.plan_text:
        table += f"\n<details><summary>The plan as printed</summary>{printed}</details>"
    return card("Plan", table, explained("Times are per microbatch; memory is at its peak."))


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
    return scrolled_table("Plan", head, rows, "stacking")


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
    hint = explained("At the peak, predicted from the profile. All bars have one scale.")
    return card("Memory per stage", f'<ul class="memory">\n{rows}\n</ul>', hint)


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
