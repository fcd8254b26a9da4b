"""``FrameQueue``: frames that wait for one connection, what is needed first before the rest.

Backwards make the gradients of the last layers first, so these lie first in a buffer; the next
forward needs the first layers first. Among parts that are ready, the one whose numbers lie last
leaves first, to owners and back (Jiang et al., OSDI'20, and Peng et al., "A Generic Communication
Scheduler for Distributed DNN Training Acceleration", SOSP'19).
"""

from __future__ import annotations

import queue
from itertools import count

from penstock.core.summation.adding import Numbers
from penstock.core.summation.frames import FrameHead, FrameKind

Frame = tuple[FrameHead, Numbers | None]

_NEWS, _NUMBERS, _FAREWELL, _END = range(4)


class FrameQueue:
    """Hands out, in this order: news of owners, numbers of older rounds, of these the last ones of
    the buffer; then that a worker has left, and at last the end."""

    def __init__(self) -> None:
        self._waiting: queue.PriorityQueue[tuple[tuple[int, int, int], int, Frame | None]] = (
            queue.PriorityQueue()
        )
        self._numbers = count()  # frames of one rank stay in their order, and are never compared

    def put(self, item: Frame | None, /) -> None:
        """Take a frame, or ``None`` at the end; does not wait."""
        self._waiting.put((_rank_of(item), next(self._numbers), item))

    def get(self) -> Frame | None:
        """Wait for the next frame."""
        return self._waiting.get()[-1]


def _rank_of(frame: Frame | None) -> tuple[int, int, int]:
    if frame is None:
        return _END, 0, 0
    head, numbers = frame
    if numbers is not None:
        return _NUMBERS, head.round, -head.start
    return (_FAREWELL if head.kind is FrameKind.ABORT else _NEWS), 0, 0
