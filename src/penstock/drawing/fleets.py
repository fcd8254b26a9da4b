"""A fleet as a figure: a row per device, a colour per job, and the bound as a line.

Backwards have a frame, forwards none; where a visit waits for its stage at its beginning, its box
is pale there. Several timelines stand below each other on one axis, predicted over measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import NamedTuple

from penstock.base.telling import wrap_to
from penstock.base.units import TimeUnit, count_of, format_share, unit_of_seconds
from penstock.core.timing.fleet_timeline import FleetTimeline, Turn
from penstock.drawing.markup import (
    coordinate,
    document,
    escaped,
    lines,
    shortened,
    tag,
    text_width,
    tick_label,
    ticks,
    write,
)

TitledFleet = tuple[str, FleetTimeline]
"""A fleet's timeline and what it is called in a picture of several."""

_WIDTH, _MARGIN, _ROW, _BAR = 960.0, 16.0, 30.0, 22.0
_HEAD, _FOOT, _LINE, _SIZE = 30.0, 40.0, 20.0, 12.0
_NUM_COLOURS = 12
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_IDLE = "·"


def fleet_text(timeline: FleetTimeline, window: int = 112) -> str:
    """A row per device, in which every column is the letter of the job that had it for longest
    meanwhile; and whose letters they are; in lines of at most ``window`` columns."""
    end, width = timeline.makespan, window - len("device 0  ││")
    rows = wrap(headline(timeline), window)
    for device, turns in enumerate(timeline.by_device):
        cells = _columns(turns, end, width) if end else [None] * width
        letters = (_IDLE if job is None else _letter(timeline, job) for job in cells)
        rows.append(f"device {device:<3}│{''.join(letters)}│")
    for job in timeline.jobs:
        how = timeline.ended.get(job, "")
        took = f"{timeline.job_seconds[job]:.4g}, until {timeline.job_ends[job]:.4g}"
        words = f"{job}: {took}{f'; {how}' if how else ''}"
        rows.append(wrap_to(words, window, f"{_letter(timeline, job)}  "))
    return "\n".join(rows)


def headline(timeline: FleetTimeline) -> str:
    """One line: what it is, how long it takes, and what it could take at least."""
    unit = unit_of_seconds(timeline.makespan)
    least = timeline.bound_seconds
    over = f", {timeline.makespan / least:.3f} × the bound" if least else ""
    return (
        f"{count_of(len(timeline.jobs), 'job')} on {count_of(timeline.num_devices, 'device')}, "
        f"{timeline.policy}, {timeline.source}: {unit.show(timeline.makespan)}{over}, "
        f"idle {format_share(timeline.idle)}"
    )


def _letter(timeline: FleetTimeline, job: str) -> str:
    return _LETTERS[timeline.jobs.index(job) % len(_LETTERS)]


def _columns(turns: Sequence[Turn], end: float, width: int) -> list[str | None]:
    """For so many equal stretches, the job that had the device for longest, if it had any for half
    of it."""
    held: list[dict[str, float]] = [defaultdict(float) for _ in range(width)]
    for turn in turns:
        first, last = turn.start / end * width, turn.end / end * width
        for column in range(int(first), min(int(last) + 1, width)):
            held[column][turn.job] += max(0.0, min(last, column + 1) - max(first, column))
    return [
        max(shares, key=lambda job: shares[job]) if sum(shares.values()) >= 0.5 else None
        for shares in held
    ]


class _FleetPlane(NamedTuple):
    left: float
    scale: float
    unit: TimeUnit
    end: float

    def x(self, seconds: float) -> float:
        """Where a moment is drawn."""
        return self.left + seconds * self.scale


def fleet_svg(timelines: Sequence[TitledFleet]) -> str:
    """Draw fleets as a standalone SVG document, one below the other on one axis.

    Args:
        timelines: with their titles; of the same jobs, so that a colour means one of them.
    """
    jobs = list(dict.fromkeys(job for _, timeline in timelines for job in timeline.jobs))
    end = max((timeline.makespan for _, timeline in timelines), default=0.0) or 1.0
    most = max(timeline.num_devices for _, timeline in timelines)
    left = _MARGIN + text_width(f"device {most - 1}", _SIZE) + 8
    plane = _FleetPlane(left, (_WIDTH - _MARGIN - left) / end, unit_of_seconds(end), end)
    keys = _keys(jobs)
    parts, top = [*_legend(keys)], _MARGIN + _LINE * (keys[-1].line + 1)
    for title, timeline in timelines:
        parts += _panel(plane, title, timeline, jobs, top)
        top += _HEAD + _ROW * timeline.num_devices + 12
    parts += _axis(plane, top)
    words = "; ".join(f"{title}: {headline(timeline)}" for title, timeline in timelines)
    return document("fleet", (_WIDTH, top + _FOOT), words, "fleet.css", parts)


def _panel(
    plane: _FleetPlane, title: str, timeline: FleetTimeline, jobs: Sequence[str], top: float
) -> Iterator[str]:
    head = f"{title}: {headline(timeline)}" if title else headline(timeline)
    yield write(_MARGIN, top + 18, shortened(head, 15, _WIDTH - 2 * _MARGIN), "title")
    for device, turns in enumerate(timeline.by_device):
        y = top + _HEAD + _ROW * device
        yield write(_MARGIN, y + _BAR / 2 + 4, f"device {device}", "muted")
        width = timeline.makespan * plane.scale
        yield tag("rect", x=plane.left, y=y, width=width, height=_BAR, class_="track")
        for turn in _shown(turns, plane):
            yield _box(plane, turn, jobs.index(turn.job), y)
    bottom = top + _HEAD + _ROW * timeline.num_devices
    if timeline.bound_seconds:
        x = plane.x(timeline.bound_seconds)
        path = f"M{coordinate(x)} {coordinate(top + _HEAD - 4)}V{coordinate(bottom - 2)}"
        yield tag("path", class_="bound", d=path)


def _shown(turns: Sequence[Turn], plane: _FleetPlane) -> Iterator[Turn]:
    """Turns as they are, or, where they are too narrow to be seen, those of each two pixels as one
    of the job that had most of them."""
    columns = int((_WIDTH - plane.left - _MARGIN) / 2)
    if len(turns) <= columns:
        yield from turns
        return
    width = plane.end / columns
    for column, job in enumerate(_columns(turns, plane.end, columns)):
        if job is not None:
            yield Turn(turns[0].device, job, 0, 0, False, column * width, (column + 1) * width)


def _box(plane: _FleetPlane, turn: Turn, job: int, y: float) -> str:
    x, width = plane.x(turn.start), max((turn.end - turn.start) * plane.scale, 0.5)
    # A frame around what is a pixel wide would be all that is seen.
    way = "B" if turn.backward and width >= 4 else "F"
    kind = f"j{job % _NUM_COLOURS} {way}"
    parts = [tag("rect", x=x, y=y, width=width, height=_BAR, class_=kind)]
    if turn.waited * plane.scale >= 1:
        wait = turn.waited * plane.scale
        parts.append(tag("rect", x=x, y=y, width=wait, height=_BAR, class_="wait"))
    if text_width(turn.label, 11) < width - 2:
        parts.append(write(x + width / 2, y + _BAR / 2 + 4, turn.label))
    words = f"{turn.job}, step {turn.step}, {turn.label}"
    return tag("g", tag("title", escaped(words)) + lines(parts), class_="turn")


def _axis(plane: _FleetPlane, top: float) -> Iterator[str]:
    end = plane.unit.factor * plane.end
    for value in ticks(0.0, end, 8):
        x = plane.x(value / plane.unit.factor)
        path = f"M{coordinate(x)} {coordinate(top - 8)}v6"
        yield tag("path", class_="grid", d=path)
        label = f"{tick_label(value)} {plane.unit.suffix}"
        yield write(x, top + 12, label, "muted", text_anchor="middle")


class _Key(NamedTuple):
    x: float
    line: int
    name: str


def _keys(jobs: Sequence[str]) -> list[_Key]:
    """Where the names of jobs stand, in as many lines as they need."""
    x, line, keys = _MARGIN, 0, []
    for job in jobs:
        name = shortened(job, _SIZE, 200)
        needed = 34 + text_width(name, _SIZE)
        if x > _MARGIN and x + needed > _WIDTH - _MARGIN:
            x, line = _MARGIN, line + 1
        keys.append(_Key(x, line, name))
        x += needed
    return keys


def _legend(keys: Sequence[_Key]) -> Iterator[str]:
    for number, key in enumerate(keys):
        y = _MARGIN + _LINE * key.line
        colour = f"j{number % _NUM_COLOURS}"
        yield tag("rect", x=key.x, y=y, width=18, height=12, class_=colour)
        yield write(key.x + 23, y + 10, key.name)
