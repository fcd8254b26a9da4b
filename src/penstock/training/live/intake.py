"""Where frames wait until the first stage is free for them, and what happens if more come."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar, get_args

from penstock.base.errors import RunError
from penstock.base.values import one_of
from penstock.training.live.frames import WhenLate

T = TypeVar("T")


class Intake(Generic[T]):
    """A queue in front of the first stage; any thread may use it.

    Frames are dropped here and nowhere else: a stage that has begun with a frame carries state of
    it, and so must all others.

    Args:
        changed: called, without a lock, after somebody has put something in.

    Attributes:
        num_dropped: frames that had to make room for newer ones.
        num_late: frames that found another one still waiting: the first stage was not free for
            that one before the next came.
        longest: the most that have waited at once.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self.num_dropped = self.num_late = self.longest = 0
        self._changed = changed
        self._waiting: deque[T] = deque()
        self._room = threading.Condition()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, item: T, when_late: WhenLate = "wait") -> bool:
        """Let something wait for the first stage. Never blocks.

        Args:
            when_late: if something waits already: ``"wait"`` behind it, ``"drop-oldest"`` to take
                its place, or ``"raise"``.

        Returns:
            Whether nothing had to make room for it.

        Raises:
            RunError: something waits, and that was to be an error.
        """
        one_of("when_late", when_late, get_args(WhenLate))
        with self._room:
            is_late = bool(self._waiting)
            self.num_late += is_late
            if is_late and when_late == "raise":
                raise RunError(
                    "a frame came before the first stage was free for the one before it; lower the "
                    "rate, plan for more devices, or give when_late='drop-oldest'"
                )
            if is_late and when_late == "drop-oldest":
                self.num_dropped += 1
                self._waiting.popleft()
            self._waiting.append(item)
            self.longest = max(self.longest, len(self._waiting))
        self._changed()
        return not (is_late and when_late == "drop-oldest")

    def take(self) -> T | None:
        """What has waited longest; ``None`` if nothing waits."""
        with self._room:
            if not self._waiting:
                return None
            self._room.notify_all()
            return self._waiting.popleft()

    def await_room(self, seconds: float) -> bool:
        """Wait until nothing waits here.

        Returns:
            Whether that came in time.
        """
        with self._room:
            return self._room.wait_for(lambda: not self._waiting, seconds)
