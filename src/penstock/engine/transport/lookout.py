"""How a rank waits for what comes in rings: it looks for a while, and then it sleeps.

A sleep costs about 50 µs of latency and as much processor time as looking for a millisecond. So who
waits looks first, where every rank's threads have cores of their own. Where the waits of late were
longer than that, it looks only briefly; where cores are fewer than threads, not at all, since
somebody else needs the core to get on with what is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from penstock.core.cluster.local import usable_cores
from penstock.engine.transport.ring import RingReader

_LONGEST_LOOK_SECONDS = 1e-3
_SHORTEST_LOOK_SECONDS = 2e-5
_LOOKS_PER_CLOCK = 8


class Lookout:
    """What looks at the rings of all other ranks of this host.

    Args:
        num_ranks: of this host, this one included.

    Attributes:
        rings: those that are looked at.
    """

    def __init__(self, num_ranks: int) -> None:
        self.rings: list[RingReader] = []
        self._num_ranks = num_ranks
        self._cores = usable_cores()
        self._seconds = _LONGEST_LOOK_SECONDS

    def look(self) -> bool:
        """Look for a while, without sleeping, whether anything comes."""
        # What some rank tells by other ways would be missed for as long as this looks.
        if len(self.rings) < self._num_ranks - 1 or not self._has_cores():
            return False
        rings, clock = self.rings, time.perf_counter
        end = clock() + self._seconds
        while clock() < end:
            for _ in range(_LOOKS_PER_CLOCK):
                for ring in rings:
                    if ring.has_news():
                        self._seconds = min(2 * self._seconds, _LONGEST_LOOK_SECONDS)
                        return True
        self._seconds = max(self._seconds / 2, _SHORTEST_LOOK_SECONDS)
        return False

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """While this rank sleeps: whoever leaves something in a ring has to wake it."""
        for ring in self.rings:
            ring.fall_asleep()
        try:
            yield
        finally:
            for ring in self.rings:
                ring.wake()

    def leave(self) -> None:
        """This rank will look no more; who leaves it something finds out when waking it."""
        for ring in self.rings:
            ring.fall_asleep()

    def _has_cores(self) -> bool:
        """Whether a core is left for every thread if this one keeps its own busy."""
        return self._num_ranks * torch.get_num_threads() <= self._cores
