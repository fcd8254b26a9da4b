"""Reads frames from a source while the pipeline works on those before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Self

_LOOK_AGAIN_SECONDS = 0.2
_PARTING_SECONDS = 5.0


class Reader:
    """Gives the frames of a source to a stream, in a thread of its own: a camera lets its reader
    wait for the next frame, and results are wanted meanwhile.

    Who leaves it early gets what was being read: a frame that has left its source is given to the
    stream in any case.

    Args:
        source: gives frames, or pairs (frame, target).
        rate: how many frames per second it gives at most; ``None``: as many as it can.
        waits: whether a frame waits until the pipeline has room for it.
        give: takes a frame and its target.
        has_room: waits for so many seconds until the pipeline has room; whether it has.
        ended: called when no more frames come.
        before: one that was left while it waited for the same source, which can give to one only.

    Attributes:
        source: as given.
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
        before: Reader | None = None,
    ) -> None:
        self.source = source
        self._period = None if rate is None else 1 / rate
        self._waits = waits
        self._give = give
        self._has_room = has_room
        self._ended = ended
        self._before = before
        self._leaves = threading.Event()
        self._is_done = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._read, name="penstock reader", daemon=True)

    @property
    def is_done(self) -> bool:
        """Whether no more frames come."""
        return self._is_done

    @property
    def is_left(self) -> bool:
        """Whether nobody waits for frames any more."""
        return self._leaves.is_set()

    @property
    def is_settled(self) -> bool:
        """Whether nothing of it is left to come or to be told."""
        return self._is_done and self._failure is None

    def raise_failure(self) -> None:
        """Raise what the source has raised, or what the pipeline has said to a frame, if nobody has
        heard of it."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _read(self) -> None:
        try:
            if self._before is not None:
                self._before._thread.join()
                self._before.raise_failure()
                self._before = None
            self._read_all()
        except BaseException as error:
            self._failure = error
        finally:
            self._is_done = True
            self._ended()

    def _read_all(self) -> None:
        begin, number, items = time.perf_counter(), 0, iter(self.source)
        while not self._leaves.is_set():
            try:
                item = next(items)
            except StopIteration:
                return
            self._await_turn(begin, number)
            self._give(*_pair(item))
            number += 1

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
        self._leaves.set()
        if threading.current_thread() is not self._thread:
            # Who goes on may read the source, too. A dead one nobody can interrupt.
            self._thread.join(_PARTING_SECONDS)


def _pair(item: Any) -> tuple[Any, Any]:
    """A frame and its target."""
    if isinstance(item, tuple | list) and len(item) == 2:  # a DataLoader makes lists
        frame, target = item
        return frame, target
    return item, None
