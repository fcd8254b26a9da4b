"""``Picture``: the text of a drawing, which a notebook shows as the drawing itself."""

from __future__ import annotations

from collections.abc import Callable


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
