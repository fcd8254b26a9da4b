"""What threads of ranks have of a minibatch that was submitted to them.

A future of ``concurrent.futures`` for each rank would take longer than a small frame of a live
stream, and an interrupt may leave one locked for ever. Here nothing is locked: ranks write what
they have come to, and tell of it in a queue.
"""

from __future__ import annotations

import queue
import time
from contextlib import suppress

from penstock.core.schedule.rounds import Segment
from penstock.engine.device.queue import Moments
from penstock.engine.run.minibatch import Minibatch, StepResult, StreamPosition

_DEAF_SECONDS = 0.5


class ThreadTicket:
    """A submitted minibatch, and what the ranks have of it.

    Args:
        num_seats: how many threads are to perform it.

    Attributes:
        segment, minibatch, position: as submitted.
        callers: what had been asked of devices then.
        results, errors: by seat, of those that are through.
        num_updates: by seat, how many steps the rank's optimizers had begun when it was through.
        has_failed: whether a rank has.
        handed: whether all ranks have been given their work.
    """

    def __init__(
        self,
        segment: Segment,
        minibatch: Minibatch,
        position: StreamPosition,
        num_seats: int,
        callers: Moments,
    ) -> None:
        self.segment = segment
        self.minibatch = minibatch
        self.position = position
        self.callers = callers
        self.results: list[StepResult | None] = [None] * num_seats
        self.errors: list[BaseException | None] = [None] * num_seats
        self.num_updates = [0] * num_seats
        self.has_failed = self.handed = False
        self._to_begin = {*range(num_seats)}
        self._to_end = {*range(num_seats)}
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    @property
    def is_done(self) -> bool:
        """Whether all ranks are through, and none has failed."""
        return not self._to_end and not self.has_failed

    def begin(self, seat: int) -> bool:
        """A rank comes to it; whether it may begin, since nobody has withdrawn it."""
        try:
            self._to_begin.remove(seat)  # for one thread only, whichever comes first
        except KeyError:
            return False
        return True

    def withdraw(self) -> None:
        """Who has not begun never will."""
        for seat in range(len(self.results)):
            if self.begin(seat):
                self._to_end.discard(seat)

    def succeed(self, seat: int, result: StepResult) -> None:
        """A rank is through."""
        self.results[seat] = result
        self._tell(seat)

    def fail(self, seat: int, error: BaseException) -> None:
        """A rank is through, by an error."""
        self.errors[seat] = error
        self.has_failed = True
        self._tell(seat)

    def _tell(self, seat: int) -> None:
        self._to_end.discard(seat)
        self._news.put(None)

    def all_went_well(self) -> bool:
        """Wait until all ranks are through, or one has failed; whether none has."""
        while self._to_end and not self.has_failed:
            self._next_news(_DEAF_SECONDS)
        return not self.has_failed

    def still_running(self, until_seconds: float) -> list[int]:
        """The seats that are not through at a moment of the monotonic clock; returns earlier if all
        are."""
        while self._to_end and (left := until_seconds - time.monotonic()) > 0:
            self._next_news(min(left, _DEAF_SECONDS))
        return sorted(self._to_end)

    def _next_news(self, seconds: float) -> None:
        # A signal that comes just before the wait begins is heard only when that ends.
        with suppress(queue.Empty):
            self._news.get(timeout=seconds)
