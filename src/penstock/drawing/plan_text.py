"""A plan as text: the same rows as in its figure, made of letters."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import NamedTuple

from penstock.base.units import picture_seconds
from penstock.core.timing.timeline import Timeline
from penstock.drawing.plan_picture import (
    MEMORY_PARTS,
    Choices,
    DeviceRow,
    Flow,
    Heading,
    PlanPicture,
    RankGroup,
    RankRow,
)
from penstock.drawing.timeline.boxes import LETTERS, WORDS
from penstock.drawing.timeline.text import text

_WIDTH = 108
_MEMORY_SHARE = 0.375
"""Of the columns that bars have, those of memory; the others are time."""

_IDLE, _FREE, _LIMIT, _OVER = "·", "·", "|", "!"
_MEMORY_LETTERS = "wgoa+"
_LEAST_BARS, _LEAST_WORDS = 24, 16


def plan_with_timeline_text(
    picture: PlanPicture, timeline: Timeline, versions: bool = False, window: int | None = None
) -> str:
    """Draw a plan with characters, and its predicted timeline below.

    Args:
        window: how many columns a line may have.
    """
    below = text(timeline, versions=versions, window=window)
    return f"{plan_text(picture, window or _WIDTH)}\n\n{below}"


def plan_text(picture: PlanPicture, width: int = _WIDTH) -> str:
    """Draw a plan with characters, in lines of at most ``width`` columns."""
    room = _room(picture, width)
    parts = [*wrap(picture.title, width), *wrap(" · ".join(picture.facts), width)]
    parts += wrap(picture.reason, width)
    for index, group in enumerate(picture.groups):
        parts += ["", *_group(picture, group, room)]
        parts += [_flow(flow, index) for flow in picture.neighbours(index)]
    parts += [f"  ↷ {flow.words}" for flow in picture.far_flows]
    legend = [line for words in _legend(picture) for line in wrap(words, width)]
    parts += ["", *legend] if legend else []
    parts += ["", *_table(picture.choices, width)] if picture.choices else []
    return "\n".join(part.replace("\N{NO-BREAK SPACE}", " ").rstrip() for part in parts)


class _Room(NamedTuple):
    """Columns for the names of devices, for time, for memory, and for a whole line."""

    names: int
    time: int
    memory: int
    line: int


def _room(picture: PlanPicture, width: int) -> _Room:
    names = max(len(device.name) for device in picture.devices)
    words = max(len(device.memory_words) for device in picture.devices)
    bars = max(width - names - words - len("   ││  100%    "), _LEAST_BARS)
    memory = round(_MEMORY_SHARE * bars)
    return _Room(names, bars - memory, memory - 1, width)


def _group(picture: PlanPicture, group: RankGroup, room: _Room) -> Iterator[str]:
    for heading in group.headings:
        yield from wrap(_heading(heading), room.line, subsequent_indent="  ")
    for rank in group.ranks:
        drawn = _blocks(picture, rank, room.time)
        share = f"{rank.seconds / picture.beat:.0%}" if picture.beat else ""
        for index, device in enumerate(rank.devices):
            shown = f"{share if index == 0 else '':>4}"
            memory = _memory(picture, device, room.memory)
            yield f"  {device.name:<{room.names}} │{drawn}│ {shown}  {memory} {device.memory_words}"


def _heading(heading: Heading) -> str:
    return " · ".join([f"stage {heading.stage}: {heading.layer_words}", *heading.remarks])


def _blocks(picture: PlanPicture, rank: RankRow, columns: int) -> str:
    """The parts of a row, each as long as its time; its name where that fits."""
    row, start = [_IDLE] * columns, 0.0
    for block in rank.blocks:
        if not picture.beat:
            length = columns // len(rank.blocks)
            first = round(start)
            row[first : first + length] = f"stage {block.stage}"[:length].ljust(length, "─")
            start += length
        for kind, seconds_ in block.parts:
            end = start + seconds_ / picture.beat * columns
            first, length = round(start), round(end) - round(start)
            names = (f"{block.stage}{LETTERS[kind]}", LETTERS[kind])
            name = next((name for name in names if len(name) <= length), "")
            row[first : first + length] = name.ljust(length, "─")
            start = end
    return "".join(row)


def _memory(picture: PlanPicture, device: DeviceRow, columns: int) -> str:
    scale = columns / picture.memory_extent
    row, start = [_FREE] * (columns + 1), 0.0
    for letter, amount in zip(_MEMORY_LETTERS, device.memory, strict=True):
        end = start + amount * scale
        first, length = round(start), round(end) - round(start)
        row[first : first + length] = letter * length
        start = end
    limit = round(device.limit_bytes * scale)
    if device.over_bytes:
        row[limit : round(start)] = _OVER * (round(start) - limit)
    if device.limit_bytes and limit <= columns:
        row[limit] = _LIMIT
    return "".join(row)


def _flow(flow: Flow, above: int) -> str:
    return f"  {'↓' if flow.source == above else '↑'} {flow.words}"


def _legend(picture: PlanPicture) -> Iterator[str]:
    present = {kind for kind, _ in picture.kinds}
    work = [f"{letter} {WORDS[kind]}" for kind, letter in LETTERS.items() if kind in present]
    if picture.beat:
        beat = f"full width: the beat, {picture_seconds(picture.beat)} per microbatch"
        yield " · ".join([*work, beat])
    used = [
        f"{letter} {name}"
        for part, (letter, name) in enumerate(zip(_MEMORY_LETTERS, MEMORY_PARTS, strict=True))
        if any(device.memory[part] for device in picture.devices)
    ]
    used += [f"{_LIMIT} limit"] if any(device.limit_bytes for device in picture.devices) else []
    used += [f"{_OVER} does not fit"] if any(d.over_bytes for d in picture.devices) else []
    if used:
        yield f"memory: {' · '.join(used)}"


def _table(choices: Choices, width: int) -> Iterator[str]:
    """A row per choice; its remark below it where the row would be too long, and what the choice
    is in several lines where even that is not enough."""
    rows = (choices.columns, *choices.rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(choices.columns))]
    apart = sum(widths) + 2 * len(widths) > width
    shown = len(widths) - 1 if apart else len(widths)
    others = sum(widths[:shown]) - widths[1] + 2 * (shown - 1)
    widths[1] = min(widths[1], max(width - others, _LEAST_WORDS))
    for index, row in enumerate(rows):
        first, *more = wrap(row[1], widths[1]) or [""]
        yield "  ".join(
            cell.ljust(room) if choices.is_text(column) else cell.rjust(room)
            for column, (cell, room) in enumerate(
                zip((row[0], first, *row[2:shown]), widths[:shown], strict=True)
            )
        )
        yield from (" " * (widths[0] + 2) + line for line in more)
        if apart and index:
            yield from wrap(row[-1], width, initial_indent="    ", subsequent_indent="    ")
