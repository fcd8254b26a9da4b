"""``draw``: the file name decides what kind of picture it becomes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from penstock.drawing.axes import Titled
from penstock.drawing.plan.page import plan_page, plan_with_timeline_svg, plan_with_timeline_text
from penstock.drawing.plan.picture import PlanPicture
from penstock.drawing.scatter import scatter_timelines
from penstock.drawing.timeline.chrome import chrome
from penstock.drawing.timeline.html import page, stacked_page
from penstock.drawing.timeline.svg import stacked, svg
from penstock.drawing.timeline.text import stacked_text, text
from penstock.errors import InputError
from penstock.timing.timeline import Timeline
from penstock.values import expect, write_atomically

Pictured = TypeVar("Pictured")

RENDERERS: dict[str, Callable[..., str]] = {
    ".txt": text,
    ".svg": svg,
    ".html": page,
    ".json": chrome,
}
STACKED_RENDERERS: dict[str, Callable[[Sequence[Titled]], str]] = {
    ".txt": stacked_text,
    ".svg": stacked,
    ".html": stacked_page,
}


def draw(
    timeline: Timeline, path: str | os.PathLike[str] | None = None, *, versions: bool = False
) -> str:
    """Draw a timeline.

    Args:
        timeline: predicted or measured.
        path: where to write the picture; its suffix chooses the kind: ``.txt``, ``.svg``,
            ``.html`` (self-contained page) or ``.json`` (Chrome trace, for Perfetto). Without a
            path nothing is written.
        versions: whether to show which version of its stage's weights each op read.

    Returns:
        The text of the picture (of the ``.txt`` kind when there is no path).

    Raises:
        InputError: the suffix is none of these, or the timeline does not know the versions.
        FileError: the file cannot be written.
    """
    expect(timeline, Timeline, "the timeline", "make one with penstock.simulate")
    if versions:
        timeline.check_versions()
    renderers = {suffix: partial(render, versions=versions) for suffix, render in RENDERERS.items()}
    return _drawn(renderers, timeline, path)


def draw_plan(
    picture: PlanPicture,
    timeline: Timeline,
    path: str | os.PathLike[str] | None = None,
    *,
    versions: bool = False,
) -> str:
    """Draw a plan with its predicted timeline below; ``path`` and ``versions`` are as for ``draw``.
    A ``.json`` holds the timeline alone.

    Args:
        picture: of the plan, from ``penstock.plans.picture.picture_of``.
    """
    if versions:
        timeline.check_versions()
    renderers: dict[str, Callable[[Timeline], str]] = {
        ".txt": partial(plan_with_timeline_text, picture, versions=versions),
        ".svg": partial(plan_with_timeline_svg, picture, versions=versions),
        ".html": partial(plan_page, picture, versions=versions),
        ".json": partial(chrome, versions=versions),
    }
    return _drawn(renderers, timeline, path)


def draw_stacked(timelines: Sequence[Titled], path: str | os.PathLike[str]) -> str:
    """Draw several timelines, each with its title, on one time axis, into ``.txt``, ``.svg`` or
    ``.html``; otherwise as ``draw``."""
    return _drawn(STACKED_RENDERERS, timelines, path)


def draw_scatter(timelines: Sequence[Titled], path: str | os.PathLike[str]) -> str:
    """Draw the peak of activations of each timeline against its bubbles into an ``.svg``; otherwise
    as ``draw``."""
    return _drawn({".svg": scatter_timelines}, timelines, path)


def _drawn(
    renderers: Mapping[str, Callable[[Pictured], str]],
    pictured: Pictured,
    path: str | os.PathLike[str] | None,
) -> str:
    if path is not None:
        expect(path, str | os.PathLike, "the path", f"end it in {', '.join(renderers)}")
    suffix = ".txt" if path is None else Path(path).suffix.lower()
    if suffix not in renderers:
        raise InputError(f"cannot draw {str(path)!r}: end the name in {', '.join(renderers)}")
    picture = renderers[suffix](pictured)
    if path is not None:
        write_atomically(path, picture if picture.endswith("\n") else picture + "\n")
    return picture
