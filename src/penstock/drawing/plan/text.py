"""A plan as text: the same rows as in its figure, made of letters."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from penstock.base.units import picture_seconds
from penstock.core.timing.timeline import Timeline
from penstock.drawing.plan.picture import (
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

_TIME, _MEMORY, _WIDTH = 40, 24, 108
_IDLE, _FREE, _LIMIT, _OVER = "·", "·", "|", "!"
_MEMORY_LETTERS = "wgoa+"


def plan_with_timeline_text(
    picture: PlanPicture, timeline: Timeline, versions: bool = False
) -> str:
    """Draw a plan with characters, and its predicted timeline below."""
    return f"{plan_text(picture)}\n\n{text(timeline, versions=versions)}"


def plan_text(picture: PlanPicture) -> str:
    """Draw a plan with characters, about 108 columns wide."""
    margin = max(len(device.name) for device in picture.devices)
    parts = [picture.title, *wrap(" · ".join(picture.facts), _WIDTH)]
    parts += wrap(picture.reason, _WIDTH)
    for index, group in enumerate(picture.groups):
        parts += ["", *_group(picture, group, margin)]
        parts += [_flow(flow, index) for flow in picture.neighbours(index)]
    parts += [f"  ↷ {flow.words}" for flow in picture.far_flows]
    legend = list(_legend(picture))
    parts += ["", *legend] if legend else []
    parts += ["", *_table(picture.choices)] if picture.choices else []
    return "\n".join(part.replace("\N{NO-BREAK SPACE}", " ").rstrip() for part in parts)


def _group(picture: PlanPicture, group: RankGroup, margin: int) -> Iterator[str]:
    yield from map(_heading, group.headings)
    for rank in group.ranks:
        drawn = _blocks(picture, rank)
        share = f"{rank.seconds / picture.beat:.0%}" if picture.beat else ""
        for index, device in enumerate(rank.devices):
            told = f"{share if index == 0 else '':>4}"
            memory = _memory(picture, device)
            yield f"  {device.name:<{margin}} │{drawn}│ {told}  {memory} {device.memory_words}"


def _heading(heading: Heading) -> str:
    return " · ".join([f"stage {heading.stage}: {heading.layer_words}", *heading.remarks])


def _blocks(picture: PlanPicture, rank: RankRow) -> str:
    """The parts of a row, each as long as its time; its name where that fits."""
    row, start = [_IDLE] * _TIME, 0.0
    for block in rank.blocks:
        if not picture.beat:
            length = _TIME // len(rank.blocks)
            first = round(start)
            row[first : first + length] = f"stage {block.stage}"[:length].ljust(length, "─")
            start += length
        for kind, seconds_ in block.parts:
            end = start + seconds_ / picture.beat * _TIME
            first, length = round(start), round(end) - round(start)
            names = (f"{block.stage}{LETTERS[kind]}", LETTERS[kind])
            name = next((name for name in names if len(name) <= length), "")
            row[first : first + length] = name.ljust(length, "─")
            start = end
    return "".join(row)


def _memory(picture: PlanPicture, device: DeviceRow) -> str:
    scale = _MEMORY / picture.memory_extent
    row, start = [_FREE] * (_MEMORY + 1), 0.0
    for letter, amount in zip(_MEMORY_LETTERS, device.memory, strict=True):
        end = start + amount * scale
        first, length = round(start), round(end) - round(start)
        row[first : first + length] = letter * length
        start = end
    limit = round(device.limit_bytes * scale)
    if device.over_bytes:
        row[limit : round(start)] = _OVER * (round(start) - limit)
    if device.limit_bytes and limit <= _MEMORY:
        row[limit] = _LIMIT
    return "".join(row)


def _flow(flow: Flow, above: int) -> str:
    return f"  {'↓' if flow.source == above else '↑'} {flow.words}"


def _legend(picture: PlanPicture) -> Iterator[str]:
    present = {kind for kind, _ in picture.kinds}
    work = [f"{letter} {WORDS[kind]}" for kind, letter in LETTERS.items() if kind in present]
    if picture.beat:
        told = f"full width: the beat, {picture_seconds(picture.beat)} per microbatch"
        yield " · ".join([*work, told])
    used = [
        f"{letter} {name}"
        for part, (letter, name) in enumerate(zip(_MEMORY_LETTERS, MEMORY_PARTS, strict=True))
        if any(device.memory[part] for device in picture.devices)
    ]
    used += [f"{_LIMIT} limit"] if any(device.limit_bytes for device in picture.devices) else []
    used += [f"{_OVER} does not fit"] if any(d.over_bytes for d in picture.devices) else []
    if used:
        yield f"memory: {' · '.join(used)}"


def _table(choices: Choices) -> Iterator[str]:
    """A row per choice; its remark below it where the row would be too long."""
    rows = (choices.columns, *choices.rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(choices.columns))]
    apart = sum(widths) + 2 * len(widths) > _WIDTH
    shown = len(widths) - 1 if apart else len(widths)
    for index, row in enumerate(rows):
        yield "  ".join(
            cell.ljust(width) if choices.is_text(column) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row[:shown], widths[:shown], strict=True))
        )
        if apart and index:
            yield from wrap(row[-1], _WIDTH, initial_indent="    ", subsequent_indent="    ")
