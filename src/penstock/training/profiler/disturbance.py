"""Signs that other programs disturbed a measurement.

Ranks that share a machine slow each other down, which is to be measured; other programs slow them
down as well, which is not. Times alone cannot tell which it was. Two other figures can: the
processor time that others had on the cores that this process may use (from the kernel, what a
hypervisor took away included), and how long a fixed piece of work takes, which also shows slower
clocks and neighbours that no kernel knows of.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

import torch

from penstock.core.cluster.local import usable_cores

QUIET_SHARE = 0.05
"""The share of the cores' time that other programs may have in an undisturbed turn."""

SLOWER_REFERENCE = 1.15
"""How many times its shortest time the fixed work may take in an undisturbed turn."""

# The kernel counts in ticks; at the ends of a turn one may be counted too much on each core.
_TICKS_OF_DOUBT = 1
_STAT = Path("/proc/stat")
_IDLE_COLUMNS = frozenset({3, 4})  # idle, iowait
_COUNTED_COLUMNS = 8  # what guests take is part of "user"


class Usage(NamedTuple):
    """Seconds that the usable cores have worked until some moment.

    Attributes:
        wall_seconds: the moment itself, on a clock.
        busy_seconds: for all programs, and other machines on the same processor; ``None`` where
            the system does not say.
        own_seconds: for this process.
        num_cores: that this process may use.
    """

    wall_seconds: float
    busy_seconds: float | None
    own_seconds: float
    num_cores: int

    @classmethod
    def now(cls) -> Usage:
        """Read the counters now."""
        return cls(time.perf_counter(), _busy_seconds(), time.process_time(), usable_cores())


def share_of_others(before: Usage, after: Usage) -> float:
    """The share of the cores' time that other programs surely had; 0 where the system is silent."""
    if before.busy_seconds is None or after.busy_seconds is None:
        return 0.0
    available = (after.wall_seconds - before.wall_seconds) * after.num_cores
    own = after.own_seconds - before.own_seconds
    doubt = _TICKS_OF_DOUBT * after.num_cores / _ticks_per_second()
    others = after.busy_seconds - before.busy_seconds - own - doubt
    return min(1.0, max(0.0, others / available)) if available > 0 else 0.0


def _busy_seconds() -> float | None:
    try:
        lines = _STAT.read_text().splitlines()
        cores = os.sched_getaffinity(0)
    except (OSError, AttributeError):  # only Linux has both
        return None
    rows = (line.split() for line in lines if line.startswith("cpu"))
    ticks = sum(
        int(count)
        for name, *counts in rows
        if name[3:].isdigit() and int(name[3:]) in cores
        for column, count in enumerate(counts[:_COUNTED_COLUMNS])
        if column not in _IDLE_COLUMNS
    )
    return ticks / _ticks_per_second()


def _ticks_per_second() -> int:
    return os.sysconf("SC_CLK_TCK")


class Reference:
    """A fixed piece of work: some arithmetic within caches, and a copy that exceeds most of them.

    It takes a few milliseconds of one thread.
    """

    _REPEATS = 3

    def __init__(self) -> None:
        self._square = torch.full((192, 192), 0.5)
        self._source = torch.zeros(4 * 2**20)
        self._target = torch.zeros_like(self._source)

    def seconds(self) -> float:
        """The shortest of a few runs: a single interruption does not count, a slow core does."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return min(self._lap() for _ in range(self._REPEATS))
        finally:
            torch.set_num_threads(threads)

    def _lap(self) -> float:
        start = time.perf_counter()
        for _ in range(4):
            torch.mm(self._square, self._square)
        self._target.copy_(self._source)
        return time.perf_counter() - start
