"""HTML pages of a timeline, of several, and of a plan with its predicted timeline: one file each,
with no network, readable without JavaScript.

The script only adds to the picture: zoom, panning, the facts of the op under the pointer, and the
way of its microbatch through all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.core.timing.timeline import Timeline
from penstock.drawing.comparison import COLUMNS, Comparison
from penstock.drawing.markup import Titled, escaped, lines, resource, tag, title_of
from penstock.drawing.plan_picture import Choices, PlanPicture
from penstock.drawing.timeline.svg import PAGE_WIDTHS, stacked, svg

_WIDE, _SHRINKS_TO, _GROWS_TO = 1200, 0.8, 1.35
"""Pictures up to this width may be scaled to the page, within what stays pleasant to read."""

_SMALL, _SMALL_SHRINKS_TO = 600, 0.6
"""Pictures up to this width, as charts, are to be seen whole on a phone."""

_COMPARED_WIDTHS = (1000.0, 3200.0)
"""Wide enough for most labels, and not so wide that a whole picture is a smear."""

_HINT = "Point at an op for its facts and to trace its microbatch."

# The page asks for nothing, and with this no browser would fetch anything for it either.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(timeline: Timeline, versions: bool = False) -> str:
    """Draw a timeline as a self-contained HTML page.

    Args:
        versions: whether to show which version of the weights each op read.
    """
    name = timeline.name or "schedule"
    title = f"{name}, {timeline.source}"
    return _page([(title, timeline)], name, title, versions)


def stacked_page(timelines: Sequence[Titled]) -> str:
    """Draw several timelines on one time axis as a self-contained HTML page, with their numbers in
    the same order above."""
    names = " · ".join(title for title, _ in timelines) or "no timeline"
    return _page(timelines, names, names)


def _numbers(timelines: Sequence[Titled]) -> str:
    """A table, which can still be read where the picture is so small that its titles cannot."""
    comparison = Comparison(tuple(timelines))
    head = "".join(tag("th", escaped(name) or " ", scope="col") for name in COLUMNS)
    rows = lines(
        tag("tr", tag("th", escaped(title) or " ", scope="row", class_="words") + cells(numbers))
        for title, *numbers in comparison.rows()
    )
    table = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
    return tag("section", tag("div", table, class_="scroll", tabindex="0"), class_="card")


def cells(texts: Sequence[str]) -> str:
    """Cells of a table's row, from plain texts."""
    return "".join(tag("td", escaped(text)) for text in texts)


def _page(timelines: Sequence[Titled], heading: str, title: str, versions: bool = False) -> str:
    # Several are looked at to be compared, and so first of all whole.
    several = len(timelines) > 1
    widths = _COMPARED_WIDTHS if several else PAGE_WIDTHS
    picture = stacked(timelines, width_range=widths, versions=versions)
    drawn = viewer(picture, title, wheel="plain", start="fit" if several else "")
    numbers = _numbers(timelines) if several else ""
    card = tag("section", drawn, class_="card")
    return html_document(title, lines([tag("h1", escaped(heading)), numbers, card]))


def html_document(title: str, body: str) -> str:
    """A whole HTML page around ``body``, which is markup already."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escaped(title)}</title>
<style>
{resource("page.css")}
</style>
</head>
<body>
<main>
{body}
</main>
<script>
{resource("page.js")}
</script>
</body>
</html>"""


def card(title: str, body: str, hint: str = "") -> str:
    """A section with its heading; ``body``, and the ``hint`` above it, are markup already."""
    words = tag("p", hint, class_="hint") if hint else ""
    return f'<section class="card">\n{tag("h2", escaped(title))}{words}\n{body}\n</section>'


def scrolled_table(name: str, head: str, rows: str, class_: str = "") -> str:
    """A table in a box in which it scrolls where it is too wide; ``head`` and ``rows`` are markup
    already."""
    content = f"\n<thead>{head}</thead>\n<tbody>\n{rows}\n</tbody>\n"
    table = tag("table", content, class_=class_) if class_ else tag("table", content)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escaped(name)}">\n'
        f"{table}\n</div>"
    )


def viewer(picture: str, name: str, wheel: str = "", start: str = "") -> str:
    """A picture in a box with zoom and hover details.

    Args:
        picture: an SVG document.
        name: for readers who do not see it.
        wheel: ``"plain"`` if the wheel zooms; otherwise it scrolls the page, and zooms with Ctrl.
        start: ``"fit"`` if all of it is to be seen at first; otherwise in its own size, unless it
            is only a little wider than the page.
    """
    buttons = (("out", "−", "Zoom out"), ("in", "+", "Zoom in"), ("fit", "Fit", "Fit to the box"))
    drawn = [
        tag("button", words, type="button", data_zoom=action, aria_label=help_, title=help_)
        for action, words, help_ in (*buttons, ("natural", "100%", "Natural size"))
    ]
    readout = tag("span", _HINT, class_="readout", role="status")
    bar = f'<div class="bar" hidden>{"".join(drawn)}{readout}</div>'
    box = f"\n{bar}\n{scroll(picture, name)}\n"
    return tag("div", box, class_="viewer", data_wheel=wheel, data_start=start)


def scroll(picture: str, name: str) -> str:
    """A picture that keeps its natural size and scrolls inside its box where that is too wide."""
    match = re.search(r'width="(\d+)"', picture)
    width = int(match[1]) if match else 0
    shrinks_to = _SHRINKS_TO if width > _SMALL else _SMALL_SHRINKS_TO
    least = width if width > _WIDE else round(width * shrinks_to)
    return tag(
        "div",
        f"\n{inline(picture)}\n",
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=name,
        style=f"--least:{least}px;--most:{round(width * _GROWS_TO)}px",
    )


def inline(picture: str) -> str:
    """An SVG document as part of an HTML page, which needs no name space."""
    return picture.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1)


_SIZE = re.compile(r'width="(\d+)" height="(\d+)"')


def plan_with_timeline_svg(
    picture: PlanPicture, timeline: Timeline, versions: bool = False, width: float | None = None
) -> str:
    """Draw a plan and its predicted timeline as one standalone SVG document.

    Args:
        versions: whether to show which version of the weights each op read.
        width: in pixels, at least 700; by default as wide as the timeline's labels need.
    """
    from penstock.drawing.plan_svg import NARROWEST, NARROWEST_AT_ALL, WIDEST, plan_svg

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
    from penstock.drawing.plan_svg import plan_svg

    facts = tag("p", escaped(" · ".join(picture.facts)), class_="subtitle")
    reason = tag("p", escaped(picture.reason)) if picture.reason else ""
    head = f"<header>{tag('h1', escaped(picture.title))}{facts}{reason}</header>"
    name = title_of(timeline)
    steps = stacked([(name, timeline)], width_range=PAGE_WIDTHS, versions=versions)
    parts = [
        head,
        card("The plan", scroll(plan_svg(picture, head=False, choices=False), picture.title)),
        card("What else there was", _table(picture.choices)) if picture.choices else "",
        card("Predicted timeline", viewer(steps, name, wheel="plain")),
    ]
    return html_document(picture.title, lines(parts))


def _table(choices: Choices) -> str:
    head = "".join(
        f'<th scope="col"{_words(choices, column)}>{escaped(name)}</th>'
        for column, name in enumerate(choices.columns)
    )
    rows = lines(f"<tr>{_cells(choices, row)}</tr>" for row in range(len(choices.rows)))
    return scrolled_table("What else there was", f"<tr>{head}</tr>", rows)


def _cells(choices: Choices, row: int) -> str:
    first, *rest = map(escaped, choices.rows[row])
    if row == choices.chosen:
        rest = [f"<b>{cell}</b>" if cell else "" for cell in rest]
    numbered = enumerate(rest, start=1)
    cells = "".join(f"<td{_words(choices, column)}>{cell}</td>" for column, cell in numbered)
    return f'<th scope="row" class="words">{first}</th>{cells}'


def _words(choices: Choices, column: int) -> str:
    return ' class="words"' if choices.is_text(column) else ""
