"""Step time against something else that a plan takes: a numbered dot for each plan, and a line
through those that no other one beats in both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from penstock.base.units import count_of
from penstock.drawing.markup import coordinate, document, tag, text_width, write
from penstock.drawing.scatter_plot import LabelPlaces, PlotBox, ScatterAxis, drawn_axes

_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 22.0, 34.0, 52.0
_RADIUS, _SIZE = 6.0, 12.0
_DISTANCES = (8.0, 16.0, 26.0)


class NumberedDot(NamedTuple):
    """A plan in the picture.

    Attributes:
        number: by which the page knows it.
        across, up: its values on the axes.
        words: what is said of it under the pointer.
        style: a class of the style sheet.
    """

    number: int
    across: float
    up: float
    words: str
    style: str


def choice_scatter(
    dots: Sequence[NumberedDot],
    efficient: Collection[int],
    across: Callable[[float, float], ScatterAxis],
    up: Callable[[float, float], ScatterAxis],
    width: float,
) -> str:
    """Draw dots as a standalone SVG document.

    Args:
        efficient: the numbers of those that a line joins.
        across, up: make an axis between two pixels.
        width: of the picture; its height follows.
    """
    height = round(min(440.0, 0.8 * width + 60))
    frame = PlotBox(_LEFT, _TOP, width - _RIGHT, height - _BOTTOM)
    x_axis, y_axis = across(frame.left, frame.right), up(frame.bottom, frame.top)
    places = {dot.number: (x_axis.place(dot.across), y_axis.place(dot.up)) for dot in dots}
    line = sorted(places[number] for number in efficient)
    front = "M" + "L".join(f"{coordinate(x)} {coordinate(y)}" for x, y in line)
    # What can't be had is drawn first, so that it hides nothing.
    ordered = sorted(dots, key=lambda dot: (dot.style == "chosen", dot.style != "absent"))
    parts = [
        *drawn_axes(frame, x_axis, y_axis),
        tag("path", class_="front", d=front) if len(line) > 1 else "",
        *(_dot(dot, places[dot.number]) for dot in ordered),
        *_numbers(places, frame),
    ]
    words = f"{y_axis.title} against {x_axis.title} of {count_of(len(dots), 'plan')}"
    return document("chart choice", (width, height), words, "choice_chart.css", parts)


def _dot(dot: NumberedDot, place: tuple[float, float]) -> str:
    x, y = place
    circle = tag("circle", tag("title", dot.words), class_=dot.style, cx=x, cy=y, r=_RADIUS)
    return tag("a", circle, href=f"#plan-{dot.number}", aria_label=dot.words)


def _numbers(places: dict[int, tuple[float, float]], frame: PlotBox) -> Iterator[str]:
    """The number of each dot beside it, where it covers no dot and no other number."""
    dots = (PlotBox.around(place, _RADIUS) for place in places.values())
    labels = LabelPlaces(frame, dots, _DISTANCES)
    for number, place in places.items():
        box = labels.take(place, text_width(str(number), _SIZE) + 2, _SIZE + 2)
        middle = (box.left + box.right) / 2
        yield write(middle, box.top + _SIZE - 1, str(number), "name", text_anchor="middle")
