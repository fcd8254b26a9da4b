"""Pictures of a run: its attempts over one axis of time, with the end of each; and the files of its
checkpoint between the plan that wrote them and those that read them, all over the same layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.drawing.markup import (
    coordinate,
    document,
    lines,
    shortened,
    tag,
    text_width,
    tick_label,
    ticks,
    write,
)

_ATTEMPTS_WIDTH, _MARGIN, _ATTEMPTS_TOP = 860.0, 16.0, 40.0
_ROW, _BAR, _SIZE = 46.0, 22.0, 12.0
_LEAST_WIDTH = 2.0


class AttemptBar(NamedTuple):
    """All ranks, once; moments are seconds since the run began.

    Attributes:
        started: ranks began to be forked.
        ready: the last of them had a pipeline; ``None`` if it never came to that.
        ended: the first of them had ended.
        first_step: the minibatch that it went on from; ``None`` if it trained on none.
        words: how it ended.
        failed: whether that was not as it should be.
    """

    started: float
    ready: float | None
    ended: float
    first_step: int | None
    words: str
    failed: bool


def attempts(bars: Sequence[AttemptBar]) -> str:
    """Draw a run as a standalone SVG document.

    Args:
        bars: in the order of time, at least one.
    """
    left = _MARGIN + text_width("attempt 00", _SIZE)
    end = max(bar.ended for bar in bars) or 1.0
    axis = _SecondsAxis(left, end)
    bottom = _ATTEMPTS_TOP + _ROW * len(bars)
    parts = [*_legend(left), *axis.grid(bottom)]
    for number, bar in enumerate(bars):
        parts += _row(axis, _ATTEMPTS_TOP + _ROW * number, number, bar)
    words = f"a run of {end:.3g} s in {len(bars)} attempts: " + "; ".join(
        f"attempt {number} {bar.words}" for number, bar in enumerate(bars)
    )
    return document("timeline", (_ATTEMPTS_WIDTH, bottom + 26), words, "timeline.css", parts)


class _SecondsAxis:
    """From seconds to pixels."""

    def __init__(self, left: float, end: float) -> None:
        self._left, self._end = left, end
        self._per_second = (_ATTEMPTS_WIDTH - _MARGIN - left) / end

    def x(self, seconds: float) -> float:
        """Where a moment is drawn."""
        return self._left + seconds * self._per_second

    def grid(self, bottom: float) -> Iterator[str]:
        """Lines at round numbers of seconds, which stand below."""
        for value in ticks(0.0, self._end, 8):
            x = self.x(value)
            path = f"M{coordinate(x)} {coordinate(_ATTEMPTS_TOP - 6)}V{coordinate(bottom)}"
            yield tag("path", class_="grid", fill="none", d=path)
            label = f"{tick_label(value)} s"
            yield write(x, bottom + 16, label, "muted small", text_anchor="middle")


def _legend(left: float) -> Iterator[str]:
    x = left
    for kind, words in (("held", "starting, building, loading"), ("F s0", "training")):
        box = tag("rect", x=x, y=8, width=22, height=12, rx=2, class_=kind)
        yield tag("g", box, class_="span")
        yield write(x + 28, 18, words)
        x += 28 + text_width(words, _SIZE) + 18
    yield _cross(x + 6, 14)
    yield write(x + 18, 18, "a rank ended")


def _cross(x: float, y: float) -> str:
    """A mark where a rank was lost."""
    path = f"M{coordinate(x - 5)} {coordinate(y - 5)}l10 10m0 -10l-10 10"
    return tag("path", class_="axis", fill="none", stroke_width=2.5, d=path)


def _row(axis: _SecondsAxis, y: float, number: int, bar: AttemptBar) -> Iterator[str]:
    yield write(_MARGIN, y + _BAR / 2 + 4, f"attempt {number}")
    ready = bar.ended if bar.ready is None else min(bar.ready, bar.ended)
    boxes = [(bar.started, ready, "held"), (ready, bar.ended, "F s0")]
    drawn = [
        tag(
            "rect", x=axis.x(start), y=y, width=max(axis.x(end) - axis.x(start), _LEAST_WIDTH),
            height=_BAR, rx=2, class_=kind,
        )
        for start, end, kind in boxes
        if end > start
    ]  # fmt: skip
    width = axis.x(bar.ended) - axis.x(ready)
    if bar.first_step is not None:
        label = f"from step {bar.first_step}"
        if text_width(label, _SIZE) < width - 8:
            drawn.append(write(axis.x(ready) + width / 2, y + _BAR / 2 + 4, label))
    yield tag("g", lines(drawn), class_="span")
    if bar.failed:
        yield _cross(axis.x(bar.ended), y + _BAR / 2)
    room = _ATTEMPTS_WIDTH - _MARGIN - axis.x(bar.started)
    fits = text_width(bar.words, 11) <= room
    x, anchor = (axis.x(bar.started), "start") if fits else (_ATTEMPTS_WIDTH - _MARGIN, "end")
    words = shortened(bar.words, 11, _ATTEMPTS_WIDTH - 2 * _MARGIN)
    yield write(x, y + _BAR + 13, words, "muted small", text_anchor=anchor)


_READ_WIDTH, _READ_TOP = 760.0, 16.0
_BLOCK_HEIGHT, _FILE_HEIGHT, _GAP = 30.0, 38.0, 44.0
_ARROW = 6.0


class CheckpointBlock(NamedTuple):
    """A stage or a file, over consecutive layers.

    Attributes:
        name: how it is called.
        first: its first layer.
        stop: the layer behind its last.
    """

    name: str
    first: int
    stop: int


class CheckpointReader(NamedTuple):
    """A plan that reads, or wrote, a checkpoint: its title, and its stages over the layers."""

    title: str
    stages: Sequence[CheckpointBlock]


def readings(
    writer: CheckpointReader, files: Sequence[CheckpointBlock], readers: Sequence[CheckpointReader]
) -> str:
    """Draw a checkpoint with who wrote it and who reads it, as a standalone SVG document.

    Args:
        writer: drawn above the files.
        files: in the order of the layers.
        readers: drawn below, one under the other.
    """
    titles = [writer.title, "checkpoint", *(reader.title for reader in readers)]
    left = _MARGIN + max(text_width(title, _SIZE) for title in titles) + 14
    picture = _Readings(left, max(block.stop for block in files))
    y = _READ_TOP
    parts = [*picture.row(writer.title, writer.stages, y, "F")]
    from_y, y = y + _BLOCK_HEIGHT, y + _BLOCK_HEIGHT + _GAP
    parts += picture.arrows(writer.stages, files, from_y, y)
    parts += picture.row("checkpoint", files, y, "W", _FILE_HEIGHT)
    bottom = y + _FILE_HEIGHT
    y = bottom + _GAP
    for number, reader in enumerate(readers):
        # The second reader's arrows begin at the files as well, and pass beside the first.
        parts += picture.arrows(files, reader.stages, bottom, y, 14.0 * number)
        parts += picture.row(reader.title, reader.stages, y, "F")
        y += _BLOCK_HEIGHT + _GAP / 2
    words = f"a checkpoint written by {writer.title}, read by " + " and ".join(titles[2:])
    height = y - _GAP / 2 + _MARGIN
    # Rows over arrows: who is passed is not crossed out.
    parts.sort(key=lambda part: not part.startswith("<path"))
    return document("timeline", (_READ_WIDTH, height), words, "timeline.css", parts)


class _Readings:
    """From layers to pixels."""

    def __init__(self, left: float, num_layers: int) -> None:
        self._left = left
        self._per_layer = (_READ_WIDTH - _MARGIN - left) / num_layers

    def _x(self, layer: float) -> float:
        return self._left + layer * self._per_layer

    def row(
        self,
        title: str,
        blocks: Sequence[CheckpointBlock],
        y: float,
        kind: str,
        height: float = _BLOCK_HEIGHT,
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
        sources: Sequence[CheckpointBlock],
        targets: Sequence[CheckpointBlock],
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
