"""Who reads which file of a checkpoint: its files between the plan that wrote it and those that
read it, all over the same layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.drawing.markup import coordinate, document, shortened, tag, text_width, write

_WIDTH, _MARGIN, _TOP = 760.0, 16.0, 16.0
_HEIGHT, _FILE_HEIGHT, _GAP = 30.0, 38.0, 44.0
_SIZE, _ARROW = 12.0, 6.0


class Block(NamedTuple):
    """What stands over some consecutive layers: a stage, or a file.

    Attributes:
        name: how it is called.
        first: its first layer.
        stop: the layer behind its last.
    """

    name: str
    first: int
    stop: int


class Reader(NamedTuple):
    """A plan that reads, or wrote, a checkpoint: its title, and its stages over the layers."""

    title: str
    stages: Sequence[Block]


def readings(writer: Reader, files: Sequence[Block], readers: Sequence[Reader]) -> str:
    """Draw a checkpoint with who wrote it and who reads it, as a standalone SVG document.

    Args:
        writer: drawn above the files.
        files: in the order of the layers.
        readers: drawn below, one under the other.
    """
    titles = [writer.title, "checkpoint", *(reader.title for reader in readers)]
    left = _MARGIN + max(text_width(title, _SIZE) for title in titles) + 14
    picture = _Picture(left, max(block.stop for block in files))
    y = _TOP
    parts = [*picture.row(writer.title, writer.stages, y, "F")]
    from_y, y = y + _HEIGHT, y + _HEIGHT + _GAP
    parts += picture.arrows(writer.stages, files, from_y, y)
    parts += picture.row("checkpoint", files, y, "W", _FILE_HEIGHT)
    bottom = y + _FILE_HEIGHT
    y = bottom + _GAP
    for number, reader in enumerate(readers):
        # The second reader's arrows begin at the files as well, and pass beside the first.
        parts += picture.arrows(files, reader.stages, bottom, y, 14.0 * number)
        parts += picture.row(reader.title, reader.stages, y, "F")
        y += _HEIGHT + _GAP / 2
    words = f"a checkpoint written by {writer.title}, read by " + " and ".join(titles[2:])
    height = y - _GAP / 2 + _MARGIN
    # Rows over arrows: who is passed is not crossed out.
    parts.sort(key=lambda part: not part.startswith("<path"))
    return document("timeline", (_WIDTH, height), words, "timeline.css", parts)


class _Picture:
    """From layers to pixels."""

    def __init__(self, left: float, num_layers: int) -> None:
        self._left = left
        self._per_layer = (_WIDTH - _MARGIN - left) / num_layers

    def _x(self, layer: float) -> float:
        return self._left + layer * self._per_layer

    def row(
        self, title: str, blocks: Sequence[Block], y: float, kind: str, height: float = _HEIGHT
    ) -> Iterator[str]:
        yield write(_MARGIN, y + height / 2 + 4, title)
        for number, block in enumerate(blocks):
            x, width = self._x(block.first) + 1, self._x(block.stop) - self._x(block.first) - 2
            box = tag(
                "rect", x=x, y=y, width=width, height=height, rx=4, class_=f"{kind} s{number % 4}"
            )
            name = shortened(block.name, _SIZE, width - 6)
            text = write(x + width / 2, y + height / 2 + 4, name)
            yield tag("g", box + text, class_="span")

    def arrows(
        self,
        sources: Sequence[Block],
        targets: Sequence[Block],
        from_y: float,
        to_y: float,
        aside: float = 0.0,
    ) -> Iterator[str]:
        """From each block to all that have layers of it, in the middle of what both have."""
        for source in sources:
            for target in targets:
                first, stop = max(source.first, target.first), min(source.stop, target.stop)
                if first < stop:
                    x = self._x((first + stop) / 2) + aside
                    head = f"l{-_ARROW / 2:g} {-_ARROW:g}m{_ARROW / 2:g} {_ARROW:g}"
                    head += f"l{_ARROW / 2:g} {-_ARROW:g}"
                    line = f"M{coordinate(x)} {coordinate(from_y + 3)}V{coordinate(to_y - 3)}{head}"
                    yield tag("path", class_="axis", fill="none", d=line)
