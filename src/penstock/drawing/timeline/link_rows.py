"""The links of a timeline, and the tiers of its ranks, as rows below the ranks: what each carries,
and when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from penstock.base.units import TimeUnit
from penstock.core.timing.spans import ALL_OF_STAGE, Transfer, TransferKind
from penstock.core.timing.timeline import Timeline
from penstock.drawing.markup import (
    lines,
    resource,
    shortened,
    tag,
    text_width,
    times_in_words,
    write,
)

ROW_HEIGHT = 21.0
"""Pixels from one link's row to the next."""

_BAR, _GAP, _LABEL = 15.0, 0.5, 9.0
_MOST_NAMED = 4

_CLASSES: Mapping[TransferKind, str] = {
    "value": "V", "gradient": "G", "sum": "S", "read": "T", "write": "O", "served": "U",
}  # fmt: skip
LETTERS: Mapping[TransferKind, str] = {
    "value": "F", "gradient": "B", "sum": "S", "read": "r", "write": "w", "served": "s",
}  # fmt: skip
"""The letter that stands in text for a kind of transfer."""

MEANS: Mapping[TransferKind, str] = {
    "value": "an output on its link",
    "gradient": "a gradient on its link",
    "sum": "a part of the gradients being summed",
    "read": "coming from a tier",
    "write": "going to a tier",
    "served": "gradients at a server, until its sums or weights are back",
}
"""The words of the legend."""


class LinkRow(NamedTuple):
    """One link, those of a sum, that to a server, or one direction of a tier.

    Attributes:
        name: of the ranks at its ends.
        transfers: what it carries, in order.
    """

    name: str
    transfers: Sequence[Transfer]


_Stay = tuple[int, float, float]
"""(stage, start, end) of what a server has."""


def link_rows(timeline: Timeline) -> list[LinkRow]:
    """The links that carry anything: those of messages first, then those of sums, those to servers,
    then tiers. Servers that have the same for as long, as is predicted of all, share a row."""
    by_link: dict[tuple[int, tuple[int, ...], str, int], list[Transfer]] = defaultdict(list)
    for transfer in timeline.transfers:
        kind = str(transfer.kind if transfer.kind in _ORDER else "message")
        server = transfer.number if kind == "served" else 0
        by_link[_ORDER.get(kind, 0), transfer.ranks, kind, server].append(transfer)
    rows: list[LinkRow] = []
    first: tuple[tuple[int, ...], int, list[_Stay]] | None = None
    for (_, ranks, kind, server), carried in sorted(by_link.items()):
        own = sorted(carried, key=lambda transfer: transfer.start)
        stays = [(transfer.stage, transfer.start, transfer.end) for transfer in own]
        if kind == "served" and first is not None and (first[0], first[2]) == (ranks, stays):
            rows[-1] = rows[-1]._replace(name=_name(ranks, kind, first[1], server))
            continue
        first = (ranks, server, stays) if kind == "served" else None
        rows.append(LinkRow(_name(ranks, kind, server, server), own))
    return rows


_ORDER = {"sum": 1, "served": 2, "read": 3, "write": 3}
"""Which rows stand below those of messages."""


def label_of(transfer: Transfer) -> str:
    """The number in its box: that of the part or microbatch, else of the stage that moves."""
    of_stage = transfer.number == ALL_OF_STAGE or transfer.kind == "served"
    return str(transfer.stage if of_stage else transfer.number)


def _name(ranks: Sequence[int], kind: str, server: int = 0, last_server: int = 0) -> str:
    """
    >>> _name((0, 1), "message"), _name((0, 2), "sum"), _name((0, 1, 2, 3, 5), "sum")
    ('0 → 1', '0 + 2', '0 … 5')
    >>> _name((1,), "read"), _name((1,), "write")
    ('1 reads', '1 writes')
    >>> _name((1,), "served", 2, 2), _name((1,), "served", 0, 3)
    ('1 ⇄ server 2', '1 ⇄ servers 0–3')
    """
    if kind == "served":
        named = f"server {server}" if server == last_server else f"servers {server}–{last_server}"
        return f"{ranks[0]} ⇄ {named}"
    if kind in ("read", "write"):
        return f"{ranks[0]} {kind}s"
    if kind == "sum" and len(ranks) > _MOST_NAMED:
        return f"{ranks[0]} … {ranks[-1]}"
    return (" + " if kind == "sum" else " → ").join(map(str, ranks))


def widest_name(timeline: Timeline) -> float:
    """Pixels that the names of the links need; 0 if there are none."""
    return max((text_width(row.name, 11) for row in link_rows(timeline)), default=0.0)


def height_of(timeline: Timeline) -> float:
    """Pixels that the rows need."""
    return ROW_HEIGHT * len(link_rows(timeline))


def names(timeline: Timeline, left: float, top: float, room: float) -> str:
    """The names of the links, which a page keeps in view."""
    return lines(
        write(left, top + index * ROW_HEIGHT + 12, shortened(row.name, 11, room), "muted small")
        for index, row in enumerate(link_rows(timeline))
    )


def boxes(
    timeline: Timeline,
    x: Callable[[float], float],
    top: float,
    unit: TimeUnit,
    zero: float,
) -> str:
    """The rows, each a track with a box per transfer.

    Args:
        x: from a time to pixels.
        top: where the first row begins.
        zero: the time at which the picture begins.
    """
    parts, length = [], x(timeline.makespan) - x(0.0)
    for index, row in enumerate(link_rows(timeline)):
        y = top + index * ROW_HEIGHT
        track = tag("rect", class_="track", x=x(0.0), y=y, width=length, height=_BAR)
        right = x(timeline.makespan)  # what goes to a tier at the end may last longer
        drawn = [
            _box(transfer, row.name, x, y, unit, zero, right)
            for transfer in row.transfers
            if x(transfer.start - zero) < right
        ]
        parts.append(tag("g", f"\n{lines([track, *drawn])}\n", class_="link"))
    return lines(parts)


def _box(
    transfer: Transfer,
    name: str,
    x: Callable[[float], float],
    y: float,
    unit: TimeUnit,
    zero: float,
    right: float,
) -> str:
    start, end = x(transfer.start - zero), min(x(transfer.end - zero), right)
    gap = _GAP if end - start > 4 else 0.0
    rectangle = tag(
        "rect", class_=_CLASSES[transfer.kind], x=start + gap, y=y + 1,
        width=max(end - start - 2 * gap, 0.8), height=_BAR - 2,
    )  # fmt: skip
    label = label_of(transfer)
    if text_width(label, _LABEL) + 3 <= end - start:
        size, middle = f"font-size:{_LABEL:g}px", (start + end) / 2
        rectangle += write(middle, y + _BAR / 2 + 3.2, label, style=size, text_anchor="middle")
    return tag("g", tag("title", _tooltip(transfer, name, unit)) + rectangle, class_="transfer")


def _tooltip(transfer: Transfer, name: str, unit: TimeUnit) -> str:
    moved = f"stage {transfer.stage}"
    if transfer.number != ALL_OF_STAGE:
        moved = f"what microbatch {transfer.number} keeps of {moved}"
    words = {
        "read": f"{moved} comes",
        "write": f"{moved} goes",
        "sum": f"part {transfer.number} of the gradients of stage {transfer.stage}",
        "value": f"output of stage {transfer.stage}, microbatch {transfer.number}",
        "served": f"gradients of stage {transfer.stage}",
        "gradient": f"gradient made by stage {transfer.stage}, microbatch {transfer.number}",
    }[transfer.kind]
    times = times_in_words(transfer.start, transfer.end, unit)
    ranks = "rank" if len(transfer.ranks) == 1 else "ranks"
    return f"{words}, {ranks} {name}; {times}"


def style() -> str:
    """The style sheet of these rows."""
    return tag("style", f"\n{resource('links.css')}\n")


def swatch(kind: TransferKind, width: float) -> str:
    """The legend's mark of a kind of transfer."""
    return tag("rect", class_=_CLASSES[kind], y=3, width=width, height=9)
