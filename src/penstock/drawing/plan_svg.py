"""A plan as a figure: a row per device, a block per stage, and what goes between them.

Blocks are as long as the device works on a microbatch, so that the longest row is what the whole
pipeline waits for. Ranks that hold the same stage stand in one card; devices that share every layer
of it have one block across their rows. Beside each row stands its memory with its limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress

from penstock.base.units import TimeUnit, picture_bytes, picture_seconds, unit_of_seconds
from penstock.core.schedule.op import Kind
from penstock.drawing.markup import (
    Rectangle,
    coordinate,
    document,
    escaped,
    legend_entries,
    lines,
    resource,
    shortened,
    tag,
    text_width,
    tick_label,
    ticks,
    without_beginning,
    wrapped,
    write,
)
from penstock.drawing.plan_picture import (
    MEMORY_PARTS,
    Choices,
    DeviceRow,
    Flow,
    Heading,
    PlanPicture,
    RankGroup,
    RankRow,
    StageBlock,
    shortened_layers,
)
from penstock.drawing.timeline.boxes import LETTERS, WORDS, ink, paint, patterns

NARROWEST, WIDEST = 1040.0, 1600.0
"""The least and the most pixels that a figure is wide by itself."""
NARROWEST_AT_ALL = 700.0
"""Below this, memory and its words leave too little room for the stages."""

_MARGIN, _PADDING = 16.0, 10.0
_ROW, _BAR, _HEADING, _GAP = 24.0, 18.0, 20.0, 10.0
_FLOW = 20.0
_WIDEST_NAME, _MEMORY_SHARE, _AFTER_BLOCKS = 170.0, 0.15, 52.0
_LANE = 14.0
_TICK_DISTANCE = 80.0
_CELL_SIZE, _BETWEEN, _LEAST_WORDS = 11.5, 16.0, 90.0

_OVER_FILL = "url(#penstock-over)"
_OVER = (
    '<pattern id="penstock-over" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<path class="stripes" d="M-1 7L7 -1M-1 1L1 -1M5 7L7 5"/></pattern>'
)
"""The hatching of the part of a bar that does not fit, known without its colour."""


@dataclass
class _Sheet:
    """Where everything goes, in pixels, and what has been drawn."""

    picture: PlanPicture
    width: float
    left: float
    right: float
    memory_left: float
    card_right: float
    unit: TimeUnit
    parts: list[str] = field(default_factory=list)
    cards: list[tuple[float, float]] = field(default_factory=list)
    beat_path: str = ""

    @property
    def scale(self) -> float:
        beat = self.picture.beat
        return (self.right - self.left) / beat if beat else 0.0

    @property
    def memory_scale(self) -> float:
        return self.memory_bar / self.picture.memory_extent

    @property
    def memory_bar(self) -> float:
        return _MEMORY_SHARE * self.width


def plan_svg(
    picture: PlanPicture, width: float = NARROWEST, head: bool = True, choices: bool = True
) -> str:
    """Draw a plan as a standalone SVG document.

    Args:
        width: in pixels.
        head: whether title, facts and reason stand above it.
        choices: whether the other choices stand below it.
    """
    sheet = _sheet(picture, width)
    top = _head(sheet, _MARGIN) if head else _MARGIN
    top = _columns(sheet, top)
    for index, group in enumerate(picture.groups):
        top = _card(sheet, index, group, top)
    _far_flows(sheet)
    top = _axis(sheet, top)
    for entries in (_work_entries(picture), _memory_entries(picture)):
        parts, bottom = legend_entries(entries, _MARGIN, top, width)
        if parts:
            sheet.parts.append(tag("g", lines(parts), class_="legend"))
            top = bottom
    if choices and picture.choices:
        table, top = _choices_table(picture.choices, _MARGIN, top + 12, width - 2 * _MARGIN)
        sheet.parts.append(table)
    words = f"{picture.title}: {'; '.join(picture.facts)}"
    style = tag("style", f"\n{resource('plan.css')}\n")
    definitions = lines([style, tag("defs", patterns(picture.kinds) + _OVER)])
    size = round(width), round(top + _MARGIN)
    return document("timeline plan", size, words, "timeline.css", sheet.parts, definitions)


def _sheet(picture: PlanPicture, width: float) -> _Sheet:
    names = max((text_width(device.name, 12) for device in picture.devices), default=0.0)
    left = _MARGIN + _PADDING + min(names, _WIDEST_NAME) + 10
    lanes = len(picture.far_flows)
    card_right = width - _MARGIN - (lanes * _LANE + 6 if lanes else 0)
    words = max((text_width(device.memory_words, 11.5) for device in picture.devices), default=0.0)
    memory_left = card_right - _PADDING - words - 8 - _MEMORY_SHARE * width
    right = memory_left - _AFTER_BLOCKS
    unit = unit_of_seconds(picture.beat)
    return _Sheet(picture, width, left, right, memory_left, card_right, unit)


def _head(sheet: _Sheet, top: float) -> float:
    picture, room = sheet.picture, sheet.width - 2 * _MARGIN
    sheet.parts.append(write(_MARGIN, top + 14, shortened(picture.title, 15, room), "title"))
    top += 22
    for line in wrapped(" · ".join(picture.facts), 12, room):
        sheet.parts.append(write(_MARGIN, top + 12, line, "muted"))
        top += 17
    for line in wrapped(picture.reason, 12, room):
        sheet.parts.append(write(_MARGIN, top + 12, line))
        top += 17
    return top + 8


def _columns(sheet: _Sheet, top: float) -> float:
    """The names of the columns."""
    any_memory = any(device.memory_bytes for device in sheet.picture.devices)
    words = "each rank's time per microbatch" if sheet.picture.beat else "no times are known"
    sheet.parts += [
        write(sheet.left, top + 12, words, "muted small"),
        write(sheet.memory_left, top + 12, "memory" if any_memory else "", "muted small"),
    ]
    return top + 18


def _card(sheet: _Sheet, index: int, group: RankGroup, top: float) -> float:
    """A group of ranks, and below it what goes to the next one; returns where that ends."""
    behind = len(sheet.parts)
    height = top + 6
    for heading in group.headings:
        height = _heading(sheet, heading, height)
    for rank in group.ranks:
        height = _rank(sheet, rank, height)
    height += 4
    place = (_MARGIN, top, sheet.card_right - _MARGIN, height - top)
    sheet.parts.insert(behind, _rectangle(place, class_="card", rx=6))
    sheet.cards.append((top, height))
    if index + 1 < len(sheet.picture.groups):
        return _flows(sheet, sheet.picture.neighbours(index), index, height)
    return height + _GAP


def _heading(sheet: _Sheet, heading: Heading, top: float) -> float:
    """Stage and layers, and its remarks at the end of the line or, for want of room, below."""
    left, right = _MARGIN + _PADDING, sheet.card_right - _PADDING
    name, remarks = f"stage {heading.stage}", " · ".join(heading.remarks)
    start = left + text_width(name, 12) + 10
    room = right - start - text_width(remarks, 11) - 16
    own_line = room < text_width(heading.layer_words, 12)
    layers = shortened_layers(heading.layers, 12, right - start if own_line else room)
    title = tag("title", escaped(", ".join(heading.layers)))
    sheet.parts += [
        tag("g", title + write(left, top + 12, name, "strong") + write(start, top + 12, layers))
    ]
    if not remarks:
        return top + _HEADING
    if not own_line:
        sheet.parts.append(write(right, top + 12, remarks, "muted small", text_anchor="end"))
        return top + _HEADING
    for line in wrapped(remarks, 11, right - start):
        top += 16
        sheet.parts.append(write(start, top + 11, line, "muted small"))
    return top + _HEADING


def _rank(sheet: _Sheet, rank: RankRow, top: float) -> float:
    """The rows of a rank's devices."""
    bottom = top + _ROW * len(rank.devices)
    lane = (sheet.left, top + 3, sheet.right - sheet.left, bottom - top - 6)
    sheet.parts.append(_rectangle(lane, class_="lane", rx=2))
    x = sheet.left
    for block in rank.blocks:
        x = _block(sheet, block, len(rank.blocks), (x, top + 2, bottom - top - 4))
    if sheet.picture.beat:
        share = f"{rank.seconds / sheet.picture.beat:.0%}"
        # The line of the beat would strike it through.
        x = x if x + 8 + text_width(share, 11) < sheet.right else sheet.right
        sheet.parts.append(write(x + 6, (top + bottom) / 2 + 4, share, "muted small"))
        sheet.beat_path += f"M{coordinate(sheet.right)} {coordinate(top)}V{coordinate(bottom)}"
    for device in rank.devices:
        name = without_beginning(device.name, 12, _WIDEST_NAME)
        sheet.parts.append(write(_MARGIN + _PADDING, top + _ROW / 2 + 4, name))
        _memory(sheet, device, top)
        top += _ROW
    return bottom


def _block(
    sheet: _Sheet, block: StageBlock, count: int, place: tuple[float, float, float]
) -> float:
    """A stage's share of a row, from ``place`` (x, top, height); returns where it ends."""
    x, top, height = place
    if not sheet.picture.beat:
        width = (sheet.right - sheet.left) / count
        box = _rectangle((x + 1, top, width - 2, height), class_="unknown", rx=3)
        middle = top + height / 2 + 4
        words = write(x + width / 2, middle, f"stage {block.stage}", "known")
        sheet.parts.append(tag("g", box + words, class_="block"))
        return x + width
    for kind, length in block.parts:
        width = length * sheet.scale
        sheet.parts.append(_part(block, kind, length, (x, top, width, height)))
        x += width
    return x


def _part(block: StageBlock, kind: Kind, length: float, place: Rectangle) -> str:
    x, top, width, height = place
    gap = 0.5 if width > 4 else 0.0
    words = f"stage {block.stage}, {WORDS[kind]}: {picture_seconds(length)} per microbatch"
    inner = (x + gap, top, max(width - 2 * gap, 0.8), height)
    corner = 2.0 if width > 8 else 0.0
    parts = [tag("title", words), _rectangle(inner, rx=corner, **paint(kind, block.shade))]
    labels = (f"{block.stage}{LETTERS[kind]}", LETTERS[kind])
    label = next((label for label in labels if text_width(label, 11) + 4 <= width), None)
    if label:
        y = top + height / 2 + 4
        class_ = ink(kind, block.shade)
        parts.append(write(x + width / 2, y, label, class_, style="font-size:11px"))
    return tag("g", "".join(parts), class_="block")


def _rectangle(place: Rectangle, content: str = "", rx: float = 0.0, **paints: str) -> str:
    x, y, width, height = place
    return tag("rect", content, x=x, y=y, width=width, height=height, rx=rx, **paints)


def _memory(sheet: _Sheet, device: DeviceRow, top: float) -> None:
    """The memory that a device needs, part by part, and how much it has."""
    x, y, scale = sheet.memory_left, top + (_ROW - _BAR) / 2 + 2, sheet.memory_scale
    height = _BAR - 4
    parts = [_rectangle((x, y, sheet.memory_bar, height), class_="lane", rx=2)]
    for index, (name, amount) in enumerate(zip(MEMORY_PARTS, device.memory, strict=True)):
        width = amount * scale
        if width:
            title = tag("title", f"{name} {picture_bytes(amount)}")
            parts.append(_rectangle((x, y, width, height), title, class_=f"m{index}"))
        x += width
    limit = sheet.memory_left + device.limit_bytes * scale
    if device.over_bytes:
        beyond = (limit, y - 2, x - limit, height + 4)
        parts += [_rectangle(beyond, fill=_OVER_FILL), _rectangle(beyond, class_="over")]
    if device.limit_bytes and limit <= sheet.memory_left + sheet.memory_bar + 1:
        path = f"M{coordinate(limit)} {coordinate(y - 4)}v{coordinate(height + 8)}"
        parts.append(tag("path", class_="limit", d=path))
    style = "small wrong" if device.over_bytes else "muted small"
    left = sheet.memory_left + sheet.memory_bar + 8
    sheet.parts += [*parts, write(left, top + _ROW / 2 + 4, device.memory_words, style)]


def _flows(sheet: _Sheet, flows: Sequence[Flow], above: int, top: float) -> float:
    """Arrows between a card and the next one, in as many lines as they need."""
    if not flows:
        return top + _GAP
    x, y = sheet.left, top + 3
    for flow in flows:
        needed = 16 + text_width(flow.words, 11) + 20
        if x > sheet.left and x + needed > sheet.card_right:
            x, y = sheet.left, y + _FLOW
        down = flow.source == above
        start, way = (y, 14) if down else (y + 14, -14)
        path = f"M{coordinate(x + 5)} {coordinate(start)}v{way}m-4 {-way // 3}l4 {way // 3}"
        path += f"l4 {-way // 3}"
        sheet.parts += [
            tag("path", class_="flow", d=path),
            write(x + 16, y + 11, flow.words, "muted small"),
        ]
        x += needed
    return y + _FLOW


def _far_flows(sheet: _Sheet) -> None:
    """Lines beside the cards, from one card to another; their numbers are in the legend's line."""
    for index, flow in enumerate(sheet.picture.far_flows):
        x = sheet.card_right + _LANE * (index + 1) - 2
        start, end = (sum(sheet.cards[card]) / 2 for card in (flow.source, flow.target))
        path = f"M{coordinate(sheet.card_right)} {coordinate(start)}H{coordinate(x)}"
        path += f"V{coordinate(end)}H{coordinate(sheet.card_right + 2)}m5 -4l-5 4l5 4"
        line = tag("path", tag("title", flow.words), class_="flow", d=path)
        sheet.parts.append(line)


def _axis(sheet: _Sheet, top: float) -> float:
    """Times below the cards, the beat across them, and the flows between cards far apart."""
    words = "; ".join(flow.words for flow in sheet.picture.far_flows)
    for line in wrapped(
        f"at the side: {words}" if words else "", 11, sheet.card_right - sheet.left
    ):
        x = sheet.card_right
        sheet.parts.append(write(x, top + 8, line, "muted small", text_anchor="end"))
        top += 16
    beat = sheet.picture.beat
    if not beat:
        return top
    factor = sheet.unit.factor
    path = f"{sheet.beat_path}M{coordinate(sheet.right)} {coordinate(top - 6)}v11"
    sheet.parts.append(tag("path", class_="beat", d=path))
    axis = f"M{coordinate(sheet.left)} {coordinate(top)}H{coordinate(sheet.right)}"
    for value in ticks(0.0, beat * factor, int((sheet.right - sheet.left) / _TICK_DISTANCE)):
        x = sheet.left + value / factor * sheet.scale
        axis += f"M{coordinate(x)} {coordinate(top)}v5"
        if x < sheet.right - 46 or value == 0:
            label = tick_label(value)
            sheet.parts.append(write(x, top + 18, label, "muted small", text_anchor="middle"))
    sheet.parts.append(tag("path", class_="axis", d=axis, fill="none"))
    words = f"beat {sheet.unit.show(beat)}"
    sheet.parts.append(write(sheet.right, top + 18, words, "small", text_anchor="middle"))
    return top + 32


def _work_entries(picture: PlanPicture) -> Iterator[tuple[str, str]]:
    present = {kind for kind, _ in picture.kinds}
    for kind, letter in LETTERS.items():
        if kind in present:
            words = f"{letter} {WORDS[kind]}"
            words += ", its share" if kind is Kind.UPDATE else ""
            yield tag("rect", y=1, width=20, height=13, rx=2, **paint(kind, 0)), words
    if picture.beat:
        yield tag("path", class_="beat", d="M10 0V15"), "beat: the slowest rank's time"
    if any(flow.num_bytes for flow in picture.flows):
        path = "M10 1v13m-4 -4l4 4l4 -4"
        yield tag("path", class_="flow", d=path), "bytes per microbatch; gradients come back"


def _memory_entries(picture: PlanPicture) -> Iterator[tuple[str, str]]:
    for index, name in enumerate(MEMORY_PARTS):
        if any(device.memory[index] for device in picture.devices):
            yield tag("rect", class_=f"m{index}", y=1, width=20, height=13), name
    if any(device.limit_bytes for device in picture.devices):
        yield tag("path", class_="limit", d="M10 -1V16"), "what the device has"
    if any(device.over_bytes for device in picture.devices):
        swatch = (1.0, 1.0, 18.0, 13.0)
        mark = _rectangle(swatch, fill=_OVER_FILL) + _rectangle(swatch, class_="over")
        yield mark, "does not fit"


def _choices_table(choices: Choices, left: float, top: float, width: float) -> tuple[str, float]:
    """A table of what else could have been done, and where it ends; words give way where it is too
    wide."""
    rows = (choices.columns, *choices.rows)
    widths = _column_widths(choices, rows, width)
    parts, rules = [], ""
    for index, row in enumerate(rows):
        x, deepest = left, 1
        for column, (cell, room) in enumerate(zip(row, widths, strict=True)):
            text = choices.is_text(column)
            texts = wrapped(cell, _CELL_SIZE, room) if text else [cell]
            deepest = max(deepest, len(texts))
            class_ = "muted small" if index == 0 else _style(choices, index - 1, column)
            end = x if text else x + room
            anchor = {} if text else {"text_anchor": "end"}
            parts += [
                write(end, top + 14 + 15 * number, line, class_, **anchor)
                for number, line in enumerate(texts)
                if line
            ]
            x += room + _BETWEEN
        top += 7 + 15 * deepest
        rules += f"M{coordinate(left)} {coordinate(top)}h{coordinate(width)}"
    return lines([*parts, tag("path", class_="rule", d=rules)]), top


def _style(choices: Choices, row: int, column: int) -> str:
    return "strong small" if row == choices.chosen or column == 0 else "small"


def _column_widths(choices: Choices, rows: Sequence[Sequence[str]], width: float) -> list[float]:
    """The width of each column; those of words shrink by the same share until all fit."""
    wanted = [
        max(text_width(cell, _CELL_SIZE * 1.04) for cell in cells)
        for cells in zip(*rows, strict=True)
    ]
    shrinks = [column > 0 and choices.is_text(column) for column in range(len(wanted))]
    room = width - _BETWEEN * (len(wanted) - 1)
    words = sum(compress(wanted, shrinks))
    numbers = sum(own for own, does in zip(wanted, shrinks, strict=True) if not does)
    share = min(1.0, max(room - numbers, _LEAST_WORDS) / words) if words else 1.0
    return [own * share if does else own for own, does in zip(wanted, shrinks, strict=True)]
