"""``draw``: the file name decides what kind of picture it becomes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from penstock.drawing.chrome import chrome
from penstock.drawing.html import page
from penstock.drawing.svg import svg
from penstock.drawing.text import text
from penstock.errors import InputError
from penstock.timeline import Timeline
from penstock.values import expect, write_atomically

RENDERERS: dict[str, Callable[[Timeline], str]] = {
    ".txt": text,
    ".svg": svg,
    ".html": page,
    ".json": chrome,
}


def draw(timeline: Timeline, path: str | os.PathLike[str] | None = None) -> str:
    """Draw a timeline.

    Args:
        timeline: predicted or measured.
        path: where to write the picture; its suffix chooses the kind: ``.txt``, ``.svg``,
            ``.html`` (self-contained page) or ``.json`` (Chrome trace, for Perfetto). Without a
            path nothing is written.

    Returns:
        The text of the picture (of the ``.txt`` kind when there is no path).

    Raises:
        InputError: the suffix is none of these.
        FileError: the file cannot be written.
    """
    expect(timeline, Timeline, "the timeline", "make one with penstock.simulate")
    suffix = ".txt" if path is None else Path(path).suffix.lower()
    if suffix not in RENDERERS:
        raise InputError(f"cannot draw {str(path)!r}: end the name in {', '.join(RENDERERS)}")
    picture = RENDERERS[suffix](timeline)
    if path is not None:
        write_atomically(path, picture if picture.endswith("\n") else picture + "\n")
    return picture
