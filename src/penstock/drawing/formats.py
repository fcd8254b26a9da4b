"""``draw``: the file name decides what kind of picture it becomes, and only that kind is loaded.

PNG and PDF are made of figures by libraries that are made for it (the extra ``pictures``): resvg
for pixels, typst for vectors with text that can be searched. Both read SVG with the same parser,
which knows nothing of the reader's screen: style sheets are resolved before, to the light ones, and
fonts to those that most machines have.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from penstock.base.arguments import public
from penstock.base.errors import InputError
from penstock.base.values import expect, number, write_atomically
from penstock.core.schedule.memory import Curve
from penstock.core.timing.fleet_timeline import FleetTimeline
from penstock.core.timing.timeline import Timeline
from penstock.drawing.markup import Titled

if TYPE_CHECKING:
    from penstock.drawing.choice_page import ChoicePicture
    from penstock.drawing.fleets import TitledFleet
    from penstock.drawing.plan_picture import PlanPicture

_NEEDED = {".png": "resvg_py", ".pdf": "typst"}
_FONTS = 'Arial,"Liberation Sans",Helvetica,"DejaVu Sans",sans-serif'
_PIXELS = 2.0
"""Of a PNG, in each direction, for each of the figure's: for screens and print as they are."""

_SHEET = re.compile(r"<style>(.*?)</style>", re.DOTALL)
_MEDIA = re.compile(r"@media[^{]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}")
_SET = re.compile(r"--([\w-]+):([^;}]+)[;]?")
_FALLBACK = re.compile(r"([\w-]+):[^;{}]+;(?=\1:var\()")
_USED = re.compile(r"var\(--([\w-]+)\)")
_FAMILY = re.compile(r"font-family:[^;}]*")
_SCHEME = re.compile(r"color-scheme:[^;}]*;?")

_OTHER_WORDS = {
    "font-weight:650": "font-weight:700",
    ".timeline [class^=on-]": ".timeline .on-I,.timeline .on-W,.timeline .on-R",
}
"""Words of style sheets that the parser does not know, and the same in words that it does."""


def check_installed(suffix: str) -> None:
    """Raise ``InputError`` unless the library is there that writes ``.png`` or ``.pdf``."""
    if find_spec(_NEEDED[suffix]) is None:
        raise InputError(
            f"{suffix} needs {_NEEDED[suffix].replace('_', '-')}; install it with "
            'pip install "penstock[pictures]", or end the name in .svg'
        )


def _rendered(picture: str, suffix: str) -> bytes:
    """An SVG document of Penstock's as ``.png`` (two pixels for each of its own, in each direction)
    or ``.pdf`` (vectors; 96 of its pixels are an inch).

    Raises:
        InputError: the library is not installed.
    """
    check_installed(suffix)
    plain = light(picture).encode()
    if suffix == ".png":
        import resvg_py

        return bytes(resvg_py.svg_to_bytes(svg_string=plain.decode(), zoom=_PIXELS))
    import typst

    page: Any = {
        "main.typ": b"#set page(width: auto, height: auto, margin: 0pt)\n"
        b'#image("picture.svg", alt: sys.inputs.words)',
        "picture.svg": plain,
    }
    match = re.search(r'aria-label="([^"]*)"', picture)
    return bytes(typst.compile(page, sys_inputs={"words": match[1] if match else ""}))


def light(picture: str) -> str:
    """An SVG document as it is on a light screen: no media queries, no variables, fonts by name."""
    sheets = [_MEDIA.sub("", sheet) for sheet in _SHEET.findall(picture)]
    # Later sheets know the names that earlier ones set.
    values = dict(pair for sheet in sheets for pair in _SET.findall(sheet))

    def resolved(match: re.Match[str]) -> str:
        sheet = _SET.sub("", _SCHEME.sub("", _MEDIA.sub("", match[1])))
        sheet = _USED.sub(lambda used: values[used[1]], _FALLBACK.sub("", sheet))
        for theirs, ours in _OTHER_WORDS.items():
            sheet = sheet.replace(theirs, ours)
        return f"<style>{_FAMILY.sub(f'font-family:{_FONTS}', sheet)}</style>"

    return _SHEET.sub(resolved, picture)


class Picture(str):
    """The text that was drawn. It is that text, and nothing else, wherever text is wanted; a
    notebook shows what ``draw`` was given as an image."""

    _cell: Callable[[], str]

    @classmethod
    def of(cls, text: str, cell: Callable[[], str]) -> Picture:
        """Text, and what makes the HTML of a notebook's cell when one asks for it."""
        picture = cls(text)
        picture._cell = cell
        return picture

    def _repr_html_(self) -> str:
        return self._cell()


Pictured = TypeVar("Pictured")

_NARROWEST = 480
_FIGURES = (".svg", ".pdf", ".png")
_KINDS = (".txt", *_FIGURES, ".html", ".json")


@runtime_checkable
class Drawable(Protocol):
    """A value of a higher room, such as ``Plan``, that knows what is to be seen of it."""

    def _drawn_(self, *, whole: bool = False) -> tuple[PlanPicture, Timeline, bool]:
        """Its picture, the timeline below, and whether that shows versions.

        Args:
            whole: whether nothing may be missing in the timeline, however long it is.
        """

    def _repr_html_(self) -> str: ...


@runtime_checkable
class DrawableChoices(Protocol):
    """Plans to choose from, which make a page."""

    def _choices_(self) -> ChoicePicture:
        """All that the page shows."""


@public()
def draw(
    timeline: Timeline | FleetTimeline | Drawable | DrawableChoices,
    path: str | os.PathLike[str] | None = None,
    *,
    versions: bool = False,
    width: float | None = None,
) -> Picture:
    """Draw a timeline, or a plan with its predicted timeline below.

    Args:
        timeline: predicted or measured; or that of a fleet, into text or a figure; or a ``Plan``,
            as ``penstock draw plan.json`` draws it: what never flushes in its steady state, with
            versions, and never narrower than 700 pixels; or ``planner.choices``, as a page.
        path: where to write the picture; its suffix chooses the kind: ``.txt``, ``.svg``,
            ``.pdf`` and ``.png`` (with the extra ``pictures``), ``.html`` (self-contained page) or
            ``.json`` (Chrome trace, for Perfetto). Without a path nothing is written.
        versions: whether to show which version of its stage's weights each op read.
        width: of the figure in pixels (at least 480), as of a paper's column; of a timeline whose
            labels do not fit, its beginning and its end are drawn. By default as wide as labels
            need. For text, pages and traces it means nothing.

    Returns:
        The text of the picture (of the ``.txt`` kind when there is no path; of the ``.svg`` kind
        for ``.pdf`` and ``.png``). As the last value of a notebook's cell, it is shown there as an
        image.

    Raises:
        InputError: the suffix is none of these, the width is too small, or the timeline does not
            know the versions; or for ``.pdf`` and ``.png``, the extra is not installed.
        FileError: the file cannot be written.
    """
    if isinstance(timeline, FleetTimeline):
        return Picture.of(draw_fleets([("", timeline)], path), timeline._repr_html_)
    if isinstance(timeline, Drawable) and not isinstance(timeline, type):
        picture, below, reads = timeline._drawn_(whole=is_trace(path))
        text = draw_plan(picture, below, path, versions=versions or reads, width=width)
        return Picture.of(text, timeline._repr_html_)
    if isinstance(timeline, DrawableChoices) and not isinstance(timeline, type):
        if path is None:
            raise InputError("plans to choose from make a page; give its name, as in 'plans.html'")
        return Picture(draw_choices(timeline._choices_(), path))
    expect(timeline, Timeline, "the timeline", "make one with penstock.simulate, or give a plan")
    assert isinstance(timeline, Timeline)  # nothing else is expected
    if versions:
        timeline.check_versions()
    render = partial(_of_timeline, versions=versions, width=_width(width))
    text = _drawn(_KINDS, render, timeline, path)
    return Picture.of(text, partial(_cell, timeline, versions))


def is_trace(path: str | os.PathLike[str] | None) -> bool:
    """Whether a picture is a trace, which lists all ops, however many there are."""
    return str(path).lower().endswith(".json")


def _cell(timeline: Timeline, versions: bool) -> str:
    from penstock.drawing.cells import timeline_cell

    return timeline_cell(timeline, versions)


def _width(width: float | None) -> float | None:
    if width is not None and number("width", width) < _NARROWEST:
        raise InputError(f"the width is {width:g} pixels; give at least {_NARROWEST}")
    return width


def _of_timeline(
    suffix: str, timeline: Timeline, *, versions: bool, width: float | None = None
) -> str:
    if suffix == ".txt":
        from penstock.drawing.timeline.text import text

        return text(timeline, versions=versions)
    if suffix == ".svg":
        from penstock.drawing.timeline.svg import svg

        return svg(timeline, width, versions=versions, whole=width is None)
    if suffix == ".html":
        from penstock.drawing.pages import page

        return page(timeline, versions=versions)
    from penstock.drawing.timeline.chrome import chrome

    return chrome(timeline, versions=versions)


def draw_plan(
    picture: PlanPicture,
    timeline: Timeline,
    path: str | os.PathLike[str] | None = None,
    *,
    versions: bool = False,
    width: float | None = None,
) -> str:
    """Draw a plan with its predicted timeline below; all else is as for ``draw``, but that the
    plan itself is not drawn narrower than 700 pixels. A ``.json`` holds the timeline alone.

    Args:
        picture: of the plan, from ``penstock.planning.plans.picture.picture_of``.
    """
    if versions:
        timeline.check_versions()
    render = partial(_of_plan, picture=picture, versions=versions, width=_width(width))
    return _drawn(_KINDS, render, timeline, path)


def _of_plan(
    suffix: str,
    timeline: Timeline,
    *,
    picture: PlanPicture,
    versions: bool,
    width: float | None,
) -> str:
    if suffix == ".txt":
        from penstock.drawing.plan_text import plan_with_timeline_text

        return plan_with_timeline_text(picture, timeline, versions=versions)
    if suffix == ".json":
        return _of_timeline(suffix, timeline, versions=versions)
    from penstock.drawing.pages import plan_page, plan_with_timeline_svg

    if suffix == ".svg":
        return plan_with_timeline_svg(picture, timeline, versions=versions, width=width)
    return plan_page(picture, timeline, versions=versions)


def draw_stacked(
    timelines: Sequence[Titled], path: str | os.PathLike[str], *, width: float | None = None
) -> str:
    """Draw several timelines, each with its title, on one time axis, into ``.txt``, a figure or
    ``.html``; otherwise as ``draw``."""
    kinds = (".txt", *_FIGURES, ".html")
    return _drawn(kinds, partial(_of_several, width=_width(width)), timelines, path)


def _of_several(suffix: str, timelines: Sequence[Titled], *, width: float | None) -> str:
    if suffix == ".txt":
        from penstock.drawing.timeline.text import stacked_text

        return stacked_text(timelines)
    if suffix == ".svg":
        from penstock.drawing.timeline.svg import stacked

        return stacked(timelines, width, whole=width is None)
    from penstock.drawing.pages import stacked_page

    return stacked_page(timelines)


def draw_choices(picture: ChoicePicture, path: str | os.PathLike[str]) -> str:
    """Draw plans to choose from as a page (``.html``)."""
    from penstock.drawing.choice_page import choice_page

    return _drawn((".html",), lambda _, shown: choice_page(shown), picture, path)


def draw_scatter(timelines: Sequence[Titled], path: str | os.PathLike[str]) -> str:
    """Draw the peak of activations of each timeline against its bubbles into a figure; otherwise
    as ``draw``."""
    from penstock.drawing.comparison import scatter_timelines

    return _drawn(_FIGURES, lambda _, scattered: scatter_timelines(scattered), timelines, path)


def draw_memory(
    curves: Mapping[str, Sequence[Curve]],
    limits: Sequence[float | None],
    path: str | os.PathLike[str],
) -> str:
    """Draw what ranks hold over time, beside what they may hold, into a figure; otherwise as
    ``draw``.

    Args:
        curves: by name, one per rank, as ``penstock.planning.plans.memory_over_time`` gives them.
        limits: bytes that each rank may hold; ``None`` where there is no limit.
    """
    from penstock.drawing.chart import memory_chart

    return _drawn(_FIGURES, lambda _, shown: memory_chart(shown, limits), curves, path)


def draw_borrowed(path: str | os.PathLike[str], num_stages: int = 3) -> str:
    """Draw two ticks of PARTIME, with an arrow from each gradient to the forward whose activations
    it goes through, into a figure; otherwise as ``draw``.

    Args:
        num_stages: rows, from 1 to 8.
    """
    from penstock.drawing.borrowed import borrowed

    return _drawn(_FIGURES, lambda _, count: borrowed(count), num_stages, path)


def draw_fleets(
    timelines: Sequence[TitledFleet], path: str | os.PathLike[str] | None = None
) -> str:
    """Draw timelines of fleets, each with its title, on one time axis, into ``.txt`` or a figure;
    otherwise as ``draw``."""
    return _drawn((".txt", *_FIGURES), _of_fleets, timelines, path)


def _of_fleets(suffix: str, timelines: Sequence[TitledFleet]) -> str:
    from penstock.drawing.fleets import fleet_svg, fleet_text

    if suffix == ".svg":
        return fleet_svg(timelines)
    texts = ((title, fleet_text(timeline)) for title, timeline in timelines)
    return "\n\n".join(f"{title}\n{text}" if title else text for title, text in texts)


def _drawn(
    kinds: Sequence[str],
    render: Callable[[str, Pictured], str],
    pictured: Pictured,
    path: str | os.PathLike[str] | None,
) -> str:
    if path is not None:
        expect(path, str | os.PathLike, "the path", f"end it in {', '.join(kinds)}")
    suffix = ".txt" if path is None else Path(path).suffix.lower()
    if suffix not in kinds:
        raise InputError(f"cannot draw {str(path)!r}: end the name in {', '.join(kinds)}")
    if suffix in (".pdf", ".png"):
        check_installed(suffix)
    picture = render(".svg" if suffix in _FIGURES else suffix, pictured)
    if path is not None:
        write_figure(path, picture)
    return picture


def write_figure(path: str | os.PathLike[str], picture: str) -> None:
    """Write a picture; an SVG document also as ``.pdf`` or ``.png``, if the path ends so.

    Raises:
        InputError: the extra ``pictures`` is not installed, which those need.
        FileError: the file cannot be written.
    """
    suffix = Path(path).suffix.lower()
    if suffix in (".pdf", ".png"):
        write_atomically(path, _rendered(picture, suffix))
    else:
        write_atomically(path, picture if picture.endswith("\n") else picture + "\n")
