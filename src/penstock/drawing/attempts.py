"""A run that was started again: an attempt per row over one axis of time, and what ended each."""

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

_WIDTH, _MARGIN, _TOP = 860.0, 16.0, 40.0
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
    axis = _Seconds(left, end)
    bottom = _TOP + _ROW * len(bars)
    parts = [*_legend(left), *axis.grid(bottom)]
    for number, bar in enumerate(bars):
        parts += _row(axis, _TOP + _ROW * number, number, bar)
    words = f"a run of {end:.3g} s in {len(bars)} attempts: " + "; ".join(
        f"attempt {number} {bar.words}" for number, bar in enumerate(bars)
    )
    return document("timeline", (_WIDTH, bottom + 26), words, "timeline.css", parts)


class _Seconds:
    """From seconds to pixels."""

    def __init__(self, left: float, end: float) -> None:
        self._left, self._end = left, end
        self._per_second = (_WIDTH - _MARGIN - left) / end

    def x(self, seconds: float) -> float:
        """Where a moment is drawn."""
        return self._left + seconds * self._per_second

    def grid(self, bottom: float) -> Iterator[str]:
        """Lines at round numbers of seconds, which stand below."""
        for value in ticks(0.0, self._end, 8):
            x = self.x(value)
            path = f"M{coordinate(x)} {coordinate(_TOP - 6)}V{coordinate(bottom)}"
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


def _row(axis: _Seconds, y: float, number: int, bar: AttemptBar) -> Iterator[str]:
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
    room = _WIDTH - _MARGIN - axis.x(bar.started)
    fits = text_width(bar.words, 11) <= room
    x, anchor = (axis.x(bar.started), "start") if fits else (_WIDTH - _MARGIN, "end")
    words = shortened(bar.words, 11, _WIDTH - 2 * _MARGIN)
    yield write(x, y + _BAR + 13, words, "muted small", text_anchor=anchor)
