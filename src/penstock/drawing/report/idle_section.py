"""Where each rank's idle time comes from, predicted beside measured: a table with bars."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.base.errors import InputError
from penstock.base.units import picture_seconds
from penstock.core.timing import Idle, idle_of
from penstock.core.timing.timeline import Timeline
from penstock.drawing.markup import escaped, lines, tag

HINT = (
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
