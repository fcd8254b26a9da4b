"""PARTIME in two ticks: which frame is where, and through whose activations each gradient goes.

A row per stage, a column per tick. In a tick, a stage runs forward with the frame that has come to
it (F, with the frame's number), and then sends a gradient back (B, with the number of the frame
whose loss it is of). An arrow leads from the gradient, as the next stage has handed it over in the
tick before, to the forward whose activations it borrows; its words say by how many frames these
are younger.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.base.values import whole
from penstock.core.schedule.op import Kind
from penstock.drawing.markup import document, lines, tag, text_width, write
from penstock.drawing.timeline.boxes import ink, paint

_MARGIN, _HEAD, _FOOT = 16.0, 74.0, 72.0
_ROW, _BAR = 78.0, 30.0
_FORWARD, _BACKWARD, _GAP = 84.0, 118.0, 58.0
_TICK = _FORWARD + _BACKWARD + _GAP
_TURN = 20.0
"""How far an arrow's ends reach out before it turns."""
_TICKS = 2


def borrowed(num_stages: int = 3) -> str:
    """Two ticks of PARTIME as a standalone SVG document.

    Args:
        num_stages: rows, from 1 to 8.

    Raises:
        InputError: another number of stages.
    """
    whole("num_stages", num_stages, 1, 8)
    left = _MARGIN + text_width(f"stage {num_stages - 1}", 12) + _GAP + 10
    width = left + _TICKS * _TICK + _MARGIN
    bottom = _HEAD + num_stages * _ROW
    # From this tick on, gradients have gone through the whole pipeline: every stage has one.
    first = 2 * num_stages
    parts = [
        tag("defs", _arrow_head()),
        write(_MARGIN, 30, "PARTIME: two ticks of a stream", "title"),
        *_columns(first, left, bottom),
        *(_stage(stage, num_stages, first, left) for stage in range(num_stages)),
        *_arrows(num_stages, first, left),
        *_words(bottom + 8),
    ]
    words = (
        f"two ticks of PARTIME on {num_stages} stages: each stage runs forward with a new frame, "
        "and backward through what that has left with the gradient of an older frame"
    )
    return document("timeline", (round(width), round(bottom + _FOOT)), words, _STYLE, parts)


_STYLE = "timeline.css"
_DRAWN = (
    ".timeline .loan{fill:none;stroke:#57606a;stroke:var(--muted);stroke-width:1.6}"
    ".timeline .loan-head{fill:#57606a;fill:var(--muted)}"
    ".timeline .box text{text-anchor:middle;fill:#10202e;font-size:13px}"
    ".timeline .box .on-dark{fill:#fff}"
)


def _frame(stage: int, tick: int) -> int:
    """Which frame goes forward at a stage."""
    return tick - stage


def _gradient(stage: int, tick: int, num_stages: int) -> int:
    """Of which frame's loss the gradient is that goes backward at a stage."""
    return _frame(stage, tick) - _age(stage, num_stages)


def _age(stage: int, num_stages: int) -> int:
    return 2 * (num_stages - 1 - stage)


def _columns(first: int, left: float, bottom: float) -> Iterator[str]:
    """Where ticks begin and end, and their numbers."""
    edges = [left - _GAP / 2 + turn * _TICK for turn in range(_TICKS + 1)]
    path = "".join(f"M{x:.2f} {_HEAD - 30:g}V{bottom - 8:g}" for x in edges)
    yield tag("path", class_="grid", d=path)
    for turn, x in enumerate(edges[:-1]):
        place = {"text_anchor": "middle"}
        yield write(x + _TICK / 2, _HEAD - 16, f"tick {first + turn}", "muted", **place)


def _place(stage: int, turn: int, left: float) -> tuple[float, float]:
    """The upper left corner of a stage's boxes in a tick."""
    return left + turn * _TICK, _HEAD + stage * _ROW


def _stage(stage: int, num_stages: int, first: int, left: float) -> str:
    parts = [write(_MARGIN, _HEAD + stage * _ROW + _BAR / 2 + 4, f"stage {stage}")]
    for turn in range(_TICKS):
        x, y = _place(stage, turn, left)
        frame = _frame(stage, first + turn)
        gradient = _gradient(stage, first + turn, num_stages)
        parts.append(_box(Kind.FORWARD, f"F{frame}", x, y, _FORWARD))
        parts.append(_box(Kind.BACKWARD, f"B{gradient}", x + _FORWARD, y, _BACKWARD))
    return lines(parts)


def _box(kind: Kind, label: str, x: float, y: float, width: float) -> str:
    rect = tag("rect", x=x + 0.5, y=y, width=width - 1, height=_BAR, rx=2, **paint(kind, 0))
    words = write(x + width / 2, y + _BAR / 2 + 4.7, label, ink(kind, 0))
    return tag("g", rect + words, class_="box", data_op=label)


def _arrows(num_stages: int, first: int, left: float) -> Iterator[str]:
    """From the gradient that came to the forward whose activations it goes through."""
    yield tag("style", f"\n{_DRAWN}\n")
    for stage in range(num_stages - 1):
        for turn in range(_TICKS):
            yield _arrow(stage, turn, f"{_age(stage, num_stages)} frames younger", left)


def _arrow(stage: int, turn: int, label: str, left: float) -> str:
    """Up from the next stage's backward of the tick before, into the forward's lower edge; of the
    first tick shown, from where that would stand."""
    x, y = _place(stage, turn, left)
    below = y + _ROW
    lane = y + _BAR + 25
    start = x - _GAP
    into = x + _FORWARD / 2
    begin = f"M{start:.2f} {below + _BAR / 2:g}h{_TURN:g}"
    path = f"{begin}V{lane:g}H{into:.2f}V{y + _BAR + 9:g}"
    words = write(into + 8, lane + 4, label, "muted small")
    return tag("path", class_="loan", d=path, marker_end="url(#penstock-loan)") + words


def _arrow_head() -> str:
    head = tag("path", class_="loan-head", d="M0 0L8 4L0 8Z")
    return tag(
        "marker",
        head,
        id="penstock-loan",
        viewBox="0 0 8 8",
        refX=3,
        refY=4,
        markerWidth=9,
        markerHeight=9,
        markerUnits="userSpaceOnUse",
        orient="auto",
    )


def _words(top: float) -> Iterator[str]:
    texts = (
        "F7: frame 7 goes forward. B3: the gradient of frame 3's loss goes backward, and the stage "
        "updates.",
        "Arrow: what the next stage handed over in the tick before goes through the newest "
        "activations.",
    )
    for number, line in enumerate(texts):
        yield write(_MARGIN, top + 18 + 20 * number, line, "muted small")
