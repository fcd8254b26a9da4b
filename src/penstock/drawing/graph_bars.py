"""A profile as a figure: for each layer in order, how long it takes and how many bytes it holds.

A cut goes between two bars: what stands to its left is one stage's work, what stands to its right
the next one's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from penstock.base.units import picture_bytes, picture_seconds
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

_WIDTH, _MARGIN, _LEFT = 760.0, 16.0, 92.0
_HEIGHT, _HEAD = 104.0, 34.0
_WIDEST_BAR, _MOST_BARS = 56.0, 300


class _Kind(NamedTuple):
    """A colour of the bars: its class in the style sheet, its name, and how much of it a layer
    has."""

    class_: str
    name: str
    amount: Callable[[Layer], float]


class _Panel(NamedTuple):
    kinds: tuple[_Kind, ...]
    show: Callable[[float], str]


_TIMES = _Panel(
    (
        _Kind("F s0", "forward", lambda layer: layer.forward_seconds),
        _Kind("B s0", "backward", lambda layer: layer.backward_seconds),
    ),
    picture_seconds,
)
_BYTES = _Panel(
    (
        _Kind("m0", "parameters", lambda layer: layer.parameter_bytes),
        _Kind("m3", "activations kept per microbatch", lambda layer: layer.activation_bytes),
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


def _drawn(panel: _Panel, bars: Sequence[Sequence[Layer]], top: float) -> Iterator[str]:
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
    panel: _Panel,
    layers: Sequence[Layer],
    amounts: Sequence[float],
    place: tuple[float, float, float, float],
) -> str:
    """One or some layers, from ``place``: x, bottom, width and the amount at the top."""
    x, y, width, most = place
    gap = max(width - _WIDEST_BAR, min(width * 0.12, 3.0))
    told = ", ".join(
        f"{kind.name} {panel.show(amount)}"
        for kind, amount in zip(panel.kinds, amounts, strict=True)
    )
    names = layers[0].name if len(layers) == 1 else f"{layers[0].name} … {layers[-1].name}"
    drawn = [tag("title", escaped(f"{names}: {told}"))]
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
