"""A page to choose a plan from: time against memory, devices or cost, with a table of the plans and
a section for each, which shows its step, its memory and why it was not chosen.

It works without JavaScript: what is shown against time is chosen by radio buttons. In each of these
pictures a numbered dot is a plan, and a line goes through those that no other one beats in both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.base.units import (
    count_of,
    four_digits,
    picture_bytes,
    picture_seconds,
    unit_of_seconds,
)
from penstock.core.timing.timeline import Timeline
from penstock.drawing.markup import (
    coordinate,
    document,
    escaped,
    lines,
    resource,
    tag,
    text_width,
    write,
)
from penstock.drawing.pages import card, html_document, inline, scroll, scrolled_table
from penstock.drawing.plan_picture import MEMORY_PARTS, DeviceRow
from penstock.drawing.scatter_plot import LabelPlaces, PlotBox, ScatterAxis, drawn_axes
from penstock.drawing.timeline.svg import svg

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


_WIDE, _NARROW, _TIMELINE = 1120.0, 360.0, 1000.0
"""Pixels of the scatter on a wide screen and on a phone, and of timelines."""

_MOST_BARS = 12
"""Of memory, for a plan."""


class PartOfStep(NamedTuple):
    """A part of a step: its name, what it is, and its seconds on the rank that works most."""

    name: str
    meaning: str
    seconds: float


@dataclass(frozen=True)
class DrawnOption:
    """A plan that can be chosen.

    Attributes:
        label: of what it is the best.
        title: the plan in a line.
        verdict: why it was chosen, or why not.
        is_possible: whether it fits, and is what was asked for.
        seconds: of a step.
        memory_bytes: of the rank that needs most.
        num_devices: that it takes.
        cost: of a step.
        cost_words: the same in words.
        slowest: the number of the rank that works most.
        parts: of a step of that rank.
        memory: of its ranks.
        timeline: of a step; ``None`` where there is too much to draw.
    """

    label: str
    title: str
    verdict: str
    is_possible: bool
    seconds: float
    memory_bytes: int
    num_devices: int
    cost: float
    cost_words: str
    slowest: int
    parts: tuple[PartOfStep, ...]
    memory: tuple[DeviceRow, ...]
    timeline: Timeline | None


@dataclass(frozen=True)
class ChoicePicture:
    """Plans to choose from.

    Attributes:
        title: of the one that was chosen, which comes first.
        options: all of them.
        efficient: by ``"memory"``, ``"devices"`` and ``"cost"``: the places of those that no other
            one beats in time and in that.
        in_money: whether costs are money, or hours of devices.
    """

    title: str
    options: tuple[DrawnOption, ...]
    efficient: Mapping[str, frozenset[int]]
    in_money: bool

    @property
    def cost_title(self) -> str:
        """The name of the cost of a step."""
        return "cost of a step" if self.in_money else "device-hours of a step"


def choice_page(picture: ChoicePicture) -> str:
    """Draw plans to choose from as a self-contained HTML page."""
    chosen = picture.options[0]
    title = f"{count_of(len(picture.options), 'plan')} to choose from"
    head = tag("h1", escaped(title)) + tag("p", escaped(chosen.verdict), class_="headline")
    hint = (
        "Further down is faster, further left takes less. The line joins the plans that no other "
        "one beats in both; ringed ones are beaten, dashed ones do not fit or were not asked for. "
        "Orange: the chosen one. Each number leads to its plan."
    )
    parts = [
        tag("style", f"\n{resource('choice_page.css')}\n"),
        f"<header>{head}</header>",
        card("Time against what it takes", _tabs(picture), escaped(hint)),
        card("All of them", _table(picture)),
        *(_section(number, option) for number, option in enumerate(picture.options, start=1)),
        "<footer>Drawn by Penstock, from predictions.</footer>",
    ]
    return html_document(title, lines(parts))


class _Measure(NamedTuple):
    """A thing that times are shown against: its name, the words of its button and of its axis, and
    a value for each plan."""

    name: str
    button: str
    title: str
    values: tuple[float, ...]
    is_whole: bool = False

    def axis(self, begin: float, end: float) -> ScatterAxis:
        return ScatterAxis(self.title, self.values, begin, end, self.is_whole)


_BYTES = {"TiB": 2.0**40, "GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0}


def _measures(picture: ChoicePicture) -> tuple[_Measure, ...]:
    """What times are shown against, in units that are read best."""
    options = picture.options
    most = max(option.memory_bytes for option in options)
    unit, size = next((pair for pair in _BYTES.items() if most >= pair[1]), ("B", 1.0))
    memory = tuple(option.memory_bytes / size for option in options)
    devices = tuple(float(option.num_devices) for option in options)
    cost = tuple(option.cost for option in options)
    button = "cost" if picture.in_money else "device-hours"
    return (
        _Measure("memory", "memory", f"memory of the fullest rank, {unit}", memory),
        _Measure("devices", "devices", "devices", devices, is_whole=True),
        _Measure("cost", button, picture.cost_title, cost),
    )


def _tabs(picture: ChoicePicture) -> str:
    """A picture against each measure, of which the checked button's is seen."""
    unit = unit_of_seconds(max(option.seconds for option in picture.options))
    times = tuple(option.seconds * unit.factor for option in picture.options)
    up = _Measure("step", "", f"time of a step, {unit.suffix}", times)
    buttons, panels, rules = [], [], ""
    for place, measure in enumerate(_measures(picture)):
        own = f"by-{measure.name}"
        checked = {} if place else {"checked": "checked"}
        buttons.append(
            tag("input", type="radio", name_="against", id=own, **checked)
            + tag("label", escaped(measure.button), for_=own)
        )
        rules += f"#{own}:checked~.tab-{measure.name}{{display:block}}"
        efficient = picture.efficient[measure.name]
        dots = [
            NumberedDot(
                place + 1,
                across,
                time,
                f"{option.title}: {_facts(option)}",
                _style(option, place, place in efficient),
            )
            for place, (option, across, time) in enumerate(
                zip(picture.options, measure.values, times, strict=True)
            )
        ]
        joined = {place + 1 for place in efficient}
        drawn = "".join(
            tag(
                "div",
                inline(choice_scatter(dots, joined, measure.axis, up.axis, width)),
                class_=size,
            )
            for size, width in (("wide", _WIDE), ("narrow", _NARROW))
        )
        panels.append(tag("div", drawn, class_=f"tab tab-{measure.name}"))
    return tag("style", rules) + tag("div", lines([*buttons, *panels]), class_="tabs")


def _style(option: DrawnOption, place: int, is_efficient: bool) -> str:
    if not place:
        return "chosen"
    if not option.is_possible:
        return "absent"
    return "efficient" if is_efficient else "beaten"


def _facts(option: DrawnOption) -> str:
    return (
        f"{picture_seconds(option.seconds)} a step, "
        f"{picture_bytes(option.memory_bytes)}, {count_of(option.num_devices, 'device')}, "
        f"{option.cost_words}"
    )


_COLUMNS = ("step", "devices", "memory")


def _table(picture: ChoicePicture) -> str:
    names = (*_COLUMNS, picture.cost_title)
    heads = "".join(tag("th", escaped(name), scope="col") for name in names)
    head = '<th scope="col" class="words">plan</th><th scope="col"></th>'
    verdict = '<th scope="col" class="verdict">verdict</th>'
    rows = lines(
        _row(number, option, names) for number, option in enumerate(picture.options, start=1)
    )
    return scrolled_table("All plans", f"<tr>{head}{heads}{verdict}</tr>", rows, "plans")


def _row(number: int, option: DrawnOption, names: Sequence[str]) -> str:
    numbers = (
        picture_seconds(option.seconds),
        str(option.num_devices),
        picture_bytes(option.memory_bytes),
        four_digits(option.cost),
    )
    link = tag("a", escaped(f"{number} · {option.label}"), href=f"#plan-{number}")
    cells = "".join(
        tag("td", escaped(cell), data_name=name) for name, cell in zip(names, numbers, strict=True)
    )
    class_ = "chosen" if number == 1 else "" if option.is_possible else "absent"
    return tag(
        "tr",
        tag("th", link, scope="row", class_="words")
        + tag("td", escaped(option.title), class_="words")
        + cells
        + tag(
            "td",
            escaped("chosen" if option.label == "chosen" else option.verdict),
            class_="verdict",
        ),
        class_=class_,
    )


def _section(number: int, option: DrawnOption) -> str:
    """All that is known of a plan."""
    head = tag("h2", f"<b>{number}</b>{escaped(option.label)} · {escaped(option.title)}")
    verdict = tag("p", escaped(option.verdict), class_="verdict")
    facts = tag("p", escaped(_facts(option)), class_="hint")
    halves = tag("div", lines([_step(option), _memory(option)]), class_="halves")
    drawn = '<p class="hint">The step has too many ops to be drawn.</p>'
    if option.timeline is not None:
        picture = svg(option.timeline, _TIMELINE, "seconds", whole=False)
        drawn = scroll(picture, f"Timeline of plan {number}")
    body = lines([head, verdict, facts, halves, tag("h3", "Its step, as predicted"), drawn])
    return tag("section", body, class_="card option", id=f"plan-{number}")


def _step(option: DrawnOption) -> str:
    """Where the seconds of a step go, as one bar with a legend."""
    bar, keys = "", ""
    for place, part in enumerate(option.parts):
        share = part.seconds / option.seconds if option.seconds else 0.0
        if share < _LEAST_SHARE:
            continue
        words = escaped(f"{part.name} {picture_seconds(part.seconds)}")
        bar += f'<i class="p{place}" style="width:{100 * share:.3g}%" title="{words}"></i>'
        meaning = escaped(part.meaning)
        keys += f'<span title="{meaning}"><i class="key p{place}"></i>{words} ({share:.0%})</span>'
    title = tag(
        "h3", f"Where its {escaped(picture_seconds(option.seconds))} go, on rank {option.slowest}"
    )
    return f'<div>{title}<div class="stack">{bar}</div><div class="parts">{keys}</div></div>'


_LEAST_SHARE = 0.001
"""Of a step that is worth a word."""


def _memory(option: DrawnOption) -> str:
    """The memory of ranks, part by part, beside what they have."""
    shown = option.memory[:_MOST_BARS]
    most = max((max(row.memory_bytes, row.limit_bytes) for row in shown), default=0) or 1
    rows = lines(_memory_row(row, most) for row in shown)
    more = len(option.memory) - len(shown)
    rest = tag("p", f"and {more} more", class_="hint") if more else ""
    used = [place for place in range(len(MEMORY_PARTS)) if any(r.memory[place] for r in shown)]
    keys = "".join(f'<span><i class="key m{k}"></i>{MEMORY_PARTS[k]}</span>' for k in used)
    legend = f'<div class="parts">{keys}</div>'
    return f'<div><h3>Memory at its peak</h3><ul class="bars">\n{rows}\n</ul>{legend}{rest}</div>'


def _memory_row(row: DeviceRow, most: int) -> str:
    parts = "".join(
        f'<i class="m{place}" style="width:{100 * amount / most:.3g}%" '
        f'title="{name} {escaped(picture_bytes(amount))}"></i>'
        for place, (name, amount) in enumerate(zip(MEMORY_PARTS, row.memory, strict=True))
        if amount
    )
    if row.limit_bytes:
        place = f"left:calc({100 * row.limit_bytes / most:.4g}% - 2px)"
        parts += f'<span class="limit" style="{place}"></span>'
    words = tag("span", escaped(row.memory_words), class_="over" if row.over_bytes else "amount")
    head = f'<div class="head"><span>{escaped(row.name)}</span>{words}</div>'
    return f'<li>{head}<div class="stack">{parts}</div></li>'
