"""What no order of turns could undercut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Bound(NamedTuple):
    """Seconds that a fleet takes at least, by reason.

    Attributes:
        devices: all work, shared evenly.
        job: the longest job, whose visits come one after another.
        reading: the tier that is to read for longest, one stage at a time.
        unit: the longest visit, which ``longest`` may lie above the others' bound at most where
            all fetches are hidden.
    """

    devices: float
    job: float
    reading: float
    unit: float

    @property
    def seconds(self) -> float:
        """The largest."""
        return max(self.devices, self.job, self.reading)

    @property
    def reason(self) -> str:
        """Which one that is, in words."""
        if self.seconds == self.devices:
            return "all work over all devices"
        return "the longest job" if self.seconds == self.job else "what the tier must read"


def bound(
    job_seconds: Sequence[float],
    num_devices: int,
    unit: float = 0.0,
    reading: Mapping[str, float] | None = None,
) -> Bound:
    """The bound of jobs that compute for so many seconds each.

    Args:
        unit: seconds of the longest visit.
        reading: by tier, seconds of everything that is read from it.

    >>> bound([4.0, 4.0, 4.0], 2).seconds
    6.0
    """
    return Bound(
        sum(job_seconds) / num_devices,
        max(job_seconds, default=0.0),
        max((reading or {}).values(), default=0.0),
        unit,
    )
