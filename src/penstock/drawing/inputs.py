"""A profile and a cluster, as they are looked at before a plan is made of them: bars for layers,
and tables for devices.

A cut goes between two bars: what stands to its left is one stage's work, what stands to its right
the next one's. The terminal and a notebook show the same tables of a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from penstock.base.units import format_bytes_per_second, picture_bytes, picture_seconds
from penstock.core.cluster import Cluster, Device, Link
from penstock.core.graph import Layer, LayerGraph
from penstock.drawing.markup import (
    coordinate,
    document,
    escaped,
    lines,
    resource,
    shortened,
    tag,
    text_width,
    write,
)

_NONE = "–"
_MOST_ALIKE = 8
"""More devices than these that are alike and stand together share a row."""


class TextTable(NamedTuple):
    """The names of the columns, of which all but the first are numbers, and a text per cell."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def cluster_tables(cluster: Cluster) -> Iterator[TextTable]:
    """All that a cluster's file says."""
    yield TextTable(("device", "memory", "speed"), list(_devices(cluster.devices)))
    joined = ("joined", "latency", "bandwidth", "shared memory")
    yield TextTable(joined, list(_joined(cluster)))
    cards = [
        (", ".join(group.members), *link_cells(group.card.link))
        for group in cluster.groups
        if group.card
    ]
    if cards:
        yield TextTable(("share a card", "latency", "bandwidth"), cards)
    if cluster.tiers:
        tiers = [
            (str(tier), rate(tier.read_bytes_per_second), rate(tier.write_bytes_per_second))
            for tier in cluster.tiers
        ]
        yield TextTable(("stages come from", "read", "written"), tiers)


def _devices(devices: Sequence[Device]) -> Iterator[tuple[str, ...]]:
    alike = groupby(devices, lambda device: (device.memory_bytes, device.speed))
    for (memory_bytes, speed), same in alike:
        names = [device.name for device in same]
        if len(names) > _MOST_ALIKE:
            names = [f"{names[0]} … {names[-1]} ({len(names)})"]
        for name in names:
            yield name, _memory(memory_bytes), f"{speed:g}"


def _joined(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    for group in cluster.groups:
        members = f"{group.name}: {', '.join(group.members)}"
        yield members, *link_cells(group.link), _memory(group.memory_bytes)
    whole = "between groups" if cluster.groups else "all"
    yield whole, *link_cells(cluster.link), _memory(cluster.memory_bytes)
    for wire in cluster.wires:
        yield " – ".join(wire.between), *link_cells(wire.link), _NONE
    for spare in cluster.spares:
        bandwidth = format_bytes_per_second(spare.bytes_per_second)
        yield f"spare {spare.name}", _NONE, bandwidth, _NONE


def _memory(num_bytes: int) -> str:
    return picture_bytes(num_bytes) if num_bytes else _NONE


def rate(bytes_per_second: float) -> str:
    """A bandwidth; 0 stands for one that nobody waits for."""
    return format_bytes_per_second(bytes_per_second) if bytes_per_second else "free"


def link_cells(link: Link) -> tuple[str, str]:
    """Latency and bandwidth."""
    return picture_seconds(link.latency_seconds), rate(link.bytes_per_second)


_WIDTH, _MARGIN, _LEFT = 760.0, 16.0, 92.0
_HEIGHT, _HEAD = 104.0, 34.0
_WIDEST_BAR, _MOST_BARS = 56.0, 300


class _BarColour(NamedTuple):
    """A colour of the bars: its class in the style sheet, its name, and how much of it a layer
    has."""

    class_: str
    name: str
    amount: Callable[[Layer], float]


class _BarPanel(NamedTuple):
    kinds: tuple[_BarColour, ...]
    show: Callable[[float], str]


_TIMES = _BarPanel(
    (
        _BarColour("F s0", "forward", lambda layer: layer.forward_seconds),
        _BarColour("B s0", "backward", lambda layer: layer.backward_seconds),
    ),
    picture_seconds,
)
_BYTES = _BarPanel(
    (
        _BarColour("m0", "parameters", lambda layer: layer.parameter_bytes),
        _BarColour("m3", "activations kept per microbatch", lambda layer: layer.activation_bytes),
    ),
    picture_bytes,
)


def graph_svg(graph: LayerGraph) -> str:
    """Draw a profile as a standalone SVG document. Of more than 300 layers, neighbours share a
    bar."""
    per_bar = math.ceil(len(graph.layers) / _MOST_BARS)
    starts = range(0, len(graph.layers), per_bar)
    bars = [graph.layers[start : start + per_bar] for start in starts]
    parts: list[str] = []
    top = _MARGIN
    for panel in (_TIMES, _BYTES):
        parts += _drawn(panel, bars, top)
        top += _HEAD + _HEIGHT + 16
    room = (_WIDTH - _LEFT - _MARGIN) / 2 - 8
    first, last = graph.layers[0].name, graph.layers[-1].name
    parts.append(write(_LEFT, top + 4, shortened(first, 11, room), "muted small"))
    if len(bars) > 1:
        words = shortened(last, 11, room)
        place = _WIDTH - _MARGIN
        parts.append(write(place, top + 4, words, "muted small", text_anchor="end"))
    words = f"{len(graph.layers)} layers from {first} to {last}: time and memory of each"
    style = tag("style", f"\n{resource('plan.css')}\n")
    size = _WIDTH, top + _MARGIN
    return document("timeline plan", size, words, "timeline.css", parts, style)


def _drawn(panel: _BarPanel, bars: Sequence[Sequence[Layer]], top: float) -> Iterator[str]:
    """A legend, and below it the bars over a grid."""
    x = _LEFT
    for kind in panel.kinds:
        yield tag("rect", class_=kind.class_, x=x, y=top, width=20, height=13, rx=2)
        yield write(x + 27, top + 11, kind.name)
        x += 27 + text_width(kind.name, 12) + 14
    amounts = [[sum(map(kind.amount, layers)) for kind in panel.kinds] for layers in bars]
    most = max(map(sum, amounts)) or 1.0
    bottom = top + _HEAD + _HEIGHT - 8
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * _HEIGHT * 0.92
        path = f"M{coordinate(_LEFT)} {coordinate(y)}H{coordinate(_WIDTH - _MARGIN)}"
        yield tag("path", class_="grid" if share else "axis", fill="none", d=path)
        label = panel.show(share * most) if share else "0"
        yield write(_LEFT - 8, y + 4, label, "muted small", text_anchor="end")
    step = (_WIDTH - _LEFT - _MARGIN) / len(bars)
    for index, (layers, parts) in enumerate(zip(bars, amounts, strict=True)):
        yield _bar(panel, layers, parts, (_LEFT + index * step, bottom, step, most))


def _bar(
    panel: _BarPanel,
    layers: Sequence[Layer],
    amounts: Sequence[float],
    place: tuple[float, float, float, float],
) -> str:
    """One or some layers, from ``place``: x, bottom, width and the amount at the top."""
    x, y, width, most = place
    gap = max(width - _WIDEST_BAR, min(width * 0.12, 3.0))
    words = ", ".join(
        f"{kind.name} {panel.show(amount)}"
        for kind, amount in zip(panel.kinds, amounts, strict=True)
    )
    names = layers[0].name if len(layers) == 1 else f"{layers[0].name} … {layers[-1].name}"
    drawn = [tag("title", escaped(f"{names}: {words}"))]
    for kind, amount in zip(panel.kinds, amounts, strict=True):
        height = amount / most * _HEIGHT * 0.92
        y -= height
        if height:
            drawn.append(
                tag(
                    "rect", class_=kind.class_, x=x + gap / 2, y=y, width=width - gap,
                    height=height,
                )
            )  # fmt: skip
    return tag("g", lines(drawn))
