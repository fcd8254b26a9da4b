"""How emulated compute passes its time: to the microsecond where the machine lets it."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping

from penstock.core.schedule import Op
from penstock.core.timing.costs import Costs

_SHORT_SLEEP_SECONDS = 1e-3
_NUM_TRIALS = 31


class Alarm:
    """Wakes at a moment of ``time.perf_counter``, which all processes of a host share.

    A long sleep overshoots by more than a short one, and by how much is hard to say. So the last
    millisecond is a sleep of its own, shorter by what such a sleep is known to overshoot, and only
    the few microseconds behind it are spun away: the processor is needed by other ranks.

    Args:
        overshoot_seconds: of a short sleep; ``calibrated`` measures it.
    """

    def __init__(self, overshoot_seconds: float) -> None:
        self._overshoot_seconds = overshoot_seconds

    @classmethod
    def calibrated(cls) -> Alarm:
        """An alarm for this machine; takes about 20 ms."""
        overshoots = []
        for _ in range(_NUM_TRIALS):
            start = time.perf_counter()
            time.sleep(_SHORT_SLEEP_SECONDS / 2)
            overshoots.append(time.perf_counter() - start - _SHORT_SLEEP_SECONDS / 2)
        return cls(min(statistics.median(overshoots), _SHORT_SLEEP_SECONDS / 2))

    def until(self, moment: float) -> None:
        """Return at ``moment``, or at once if it has passed."""
        for spare in (_SHORT_SLEEP_SECONDS, self._overshoot_seconds):
            remaining = moment - time.perf_counter() - spare
            if remaining > 0:
                time.sleep(remaining)
        while time.perf_counter() < moment:
            pass


class Waits(ABC):
    """What an emulated op does instead of computing."""

    @abstractmethod
    def begin(self, start: float) -> None:
        """A step begins at ``start``, on every rank."""

    @abstractmethod
    def wait(self, op: Op) -> None:
        """Let the time of ``op`` pass."""


class RelativeWaits(Waits):
    """Each op takes its time from when it starts, as real compute does: whatever comes between ops
    (messages, the interpreter) makes the step longer."""

    def __init__(self, alarm: Alarm, costs: Costs) -> None:
        self._alarm = alarm
        self._costs = costs

    def begin(self, start: float) -> None:
        """Nothing to note: an op waits from whenever it starts."""

    def wait(self, op: Op) -> None:
        """As ``Waits`` promises."""
        self._alarm.until(time.perf_counter() + self._costs.duration(op))


class LogicalWaits(Waits):
    """Each op ends when the prediction says: exact by construction and blind to overhead. For
    tests of order only."""

    def __init__(self, alarm: Alarm, ends: Mapping[Op, float]) -> None:
        self._alarm = alarm
        self._ends = ends
        self._start = 0.0

    def begin(self, start: float) -> None:
        """As ``Waits`` promises."""
        self._start = start

    def wait(self, op: Op) -> None:
        """As ``Waits`` promises."""
        self._alarm.until(self._start + self._ends[op])
