"""A plan's picture with its predicted timeline below: one figure, one page."""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.core.timing.timeline import Timeline
from penstock.drawing.markup import escaped, lines, tag
from penstock.drawing.plan.picture import Choices, PlanPicture
from penstock.drawing.plan.svg import NARROWEST, NARROWEST_AT_ALL, WIDEST, plan_svg
from penstock.drawing.timeline.html import document, inline, scroll, viewer
from penstock.drawing.timeline.svg import PAGE_WIDTHS, stacked, svg

_SIZE = re.compile(r'width="(\d+)" height="(\d+)"')


def plan_with_timeline_svg(
    picture: PlanPicture, timeline: Timeline, versions: bool = False, width: float | None = None
) -> str:
    """Draw a plan and its predicted timeline as one standalone SVG document.

    Args:
        versions: whether to show which version of the weights each op read.
        width: in pixels, at least 700; by default as wide as the timeline's labels need.
    """
    if width is not None:
        width = max(width, NARROWEST_AT_ALL)
        steps = svg(timeline, width, versions=versions, whole=False)
        return _below_each_other([plan_svg(picture, width), steps], picture.title)
    steps = svg(timeline, versions=versions)
    width = min(max(_size(steps)[0], NARROWEST), WIDEST)
    return _below_each_other([plan_svg(picture, width), steps], picture.title)


def _size(picture: str) -> tuple[int, int]:
    """Width and height of an SVG document."""
    match = _SIZE.search(picture)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _below_each_other(documents: Sequence[str], words: str) -> str:
    """SVG documents inside a larger one."""
    parts, width, top = [], 0, 0
    for picture in documents:
        own_width, own_height = _size(picture)
        parts.append(inline(picture).replace("<svg", f'<svg y="{top}"', 1))
        width, top = max(width, own_width), top + own_height
    # The style sheets inside hold for the whole document, so this ground has their colour.
    paper = tag("rect", class_="paper", width=width, height=top)
    return tag(
        "svg",
        f"\n{lines([paper, *parts])}\n",
        xmlns="http://www.w3.org/2000/svg",
        class_="timeline",
        width=width,
        height=top,
        viewBox=f"0 0 {width} {top}",
        role="img",
        aria_label=words,
    )


def plan_page(picture: PlanPicture, timeline: Timeline, versions: bool = False) -> str:
    """Draw a plan and its predicted timeline as a self-contained HTML page."""
    facts = tag("p", escaped(" · ".join(picture.facts)), class_="subtitle")
    reason = tag("p", escaped(picture.reason)) if picture.reason else ""
    head = f"<header>{tag('h1', escaped(picture.title))}{facts}{reason}</header>"
    name = f"{timeline.name or 'schedule'}, {timeline.source}"
    steps = stacked([(name, timeline)], width_range=PAGE_WIDTHS, versions=versions)
    parts = [
        head,
        _card("The plan", scroll(plan_svg(picture, head=False, choices=False), picture.title)),
        _card("What else there was", _table(picture.choices)) if picture.choices else "",
        _card("Predicted timeline", viewer(steps, name, wheel="plain")),
    ]
    return document(picture.title, lines(parts))


def _card(title: str, body: str) -> str:
    return f'<section class="card">\n{tag("h2", title)}\n{body}\n</section>'


def _table(choices: Choices) -> str:
    head = "".join(
        f'<th scope="col"{_words(choices, column)}>{escaped(name)}</th>'
        for column, name in enumerate(choices.columns)
    )
    rows = lines(f"<tr>{_cells(choices, row)}</tr>" for row in range(len(choices.rows)))
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="What else there was">\n'
        f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n</div>"
    )


def _cells(choices: Choices, row: int) -> str:
    first, *rest = map(escaped, choices.rows[row])
    if row == choices.chosen:
        rest = [f"<b>{cell}</b>" if cell else "" for cell in rest]
    numbered = enumerate(rest, start=1)
    cells = "".join(f"<td{_words(choices, column)}>{cell}</td>" for column, cell in numbered)
    return f'<th scope="row" class="words">{first}</th>{cells}'


def _words(choices: Choices, column: int) -> str:
    return ' class="words"' if choices.is_text(column) else ""
