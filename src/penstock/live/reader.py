"""Reads frames from a source while the pipeline works on those before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Self

_LOOK_AGAIN_SECONDS = 0.2


class Reader:
    """Gives the frames of a source to a stream, in a thread of its own: a camera lets its reader
    wait for the next frame, and results are wanted meanwhile.

    Args:
        source: gives frames, or pairs (frame, target).
        rate: how many frames per second it gives at most; ``None``: as many as it can.
        waits: whether a frame waits until the pipeline has room for it.
        give: takes a frame and its target.
        has_room: waits for so many seconds until the pipeline has room; whether it has.
        ended: called when no more frames come.
    """

    def __init__(
        self,
        source: Iterable[Any],
        *,
        rate: float | None,
        waits: bool,
        give: Callable[[Any, Any], object],
        has_room: Callable[[float], bool],
        ended: Callable[[], None],
    ) -> None:
        self._source = source
        self._period = None if rate is None else 1 / rate
        self._waits = waits
        self._give = give
        self._has_room = has_room
        self._ended = ended
        self._leaves = threading.Event()
        self._is_done = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._read, name="penstock reader", daemon=True)

    @property
    def is_done(self) -> bool:
        """Whether no more frames come."""
        return self._is_done

    def raise_failure(self) -> None:
        """Raise what the source has raised, or what the pipeline has said to a frame."""
        if self._failure is not None:
            raise self._failure

    def _read(self) -> None:
        try:
            begin = time.perf_counter()
            for number, item in enumerate(self._source):
                self._await_turn(begin, number)
                if self._leaves.is_set():
                    return
                self._give(*_pair(item))
        except BaseException as error:
            self._failure = error
        finally:
            self._is_done = True
            self._ended()

    def _await_turn(self, begin: float, number: int) -> None:
        if self._period is not None:
            self._leaves.wait(max(0.0, begin + number * self._period - time.perf_counter()))
        while self._waits and not self._leaves.is_set():
            if self._has_room(_LOOK_AGAIN_SECONDS):
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # It may be waiting for the source, which nobody can interrupt.
        self._leaves.set()


def _pair(item: Any) -> tuple[Any, Any]:
    """A frame and its target."""
    if isinstance(item, tuple | list) and len(item) == 2:  # a DataLoader makes lists
        frame, target = item
        return frame, target
    return item, None
