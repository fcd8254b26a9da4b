"""Sections of a report: where idle time comes from, what its words mean, and what a reader takes
from it: the command, to copy; the plan, the losses and the run, as files in the page.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping

from penstock.base.errors import InputError
from penstock.base.units import picture_seconds
from penstock.core.timing import Idle, idle_of
from penstock.core.timing.timeline import Timeline
from penstock.drawing.markup import escaped, lines, tag
from penstock.drawing.report.run_report import Report

_MOST_BYTES = 2_000_000
"""A larger file is not put into the page as well; it lies beside it."""


def taking_section(report: Report) -> str:
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
    return f'<section class="card">\n{tag("h2", "Again, or elsewhere")}\n{body}\n</section>'


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


IDLE_HINT = (
    "Bubble: what the schedule's order forces. Waiting: what slow ops and late starts of other "
    "ranks add. Communication: what messages add beyond what compute hides. All bars have one "
    "scale."
)

_STYLES = {"bubble": "m1", "waiting": "m2", "communication": "m0"}


def idle_table(timelines: Mapping[str, Timeline]) -> str:
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
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Idle time">\n'
        f'<table class="idle">\n<thead><tr>{head}{keys}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n'
        "</table>\n</div>"
    )


def _rows(rank: int, idle: Mapping[str, Idle], most: float) -> str:
    """A rank's rows, under one number."""
    number = f'<th scope="rowgroup" rowspan="{len(idle)}">{rank}</th>'
    first, *others = (_cells(title, one, most) for title, one in idle.items())
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
