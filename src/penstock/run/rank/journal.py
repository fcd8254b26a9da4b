"""What a rank has done last and what it does now, for whoever must find out why a job stands."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from penstock.schedule import Op

NUM_SHOWN = 10

_NO_WAITS: Mapping[Op, str] = MappingProxyType({})


class Record(NamedTuple):
    """When one op ran, in seconds of this host's monotonic clock."""

    op: Op
    start: float
    end: float


class Journal:
    """What one rank does for one minibatch; written by its thread, read by any.

    Args:
        waiting: what ops that receive wait for.

    Attributes:
        records: when the ops ran that are done.
        current: the op that is being performed.
        since: when it began.
    """

    def __init__(self, waiting: Mapping[Op, str] = _NO_WAITS) -> None:
        self.records: list[Record] = []
        self.current: Op | None = None
        self.since = 0.0
        self._waiting = waiting

    def end(self) -> None:
        """The minibatch has ended, well or not: nothing is waited for any more."""
        self._waiting = _NO_WAITS

    def text(self, rank: int) -> str:
        """One line: the last ops, and what the rank does now."""
        done = " ".join(str(record.op) for record in self.records[-NUM_SHOWN:]) or "nothing"
        op = self.current
        if op is None:
            return f"rank {rank}: did {done}; idle"
        seconds = time.perf_counter() - self.since
        doing = f"at {op} for {seconds:.3g} s"
        if op in self._waiting:
            doing += f" ({self._waiting[op]})"
        return f"rank {rank}: did {done}; {doing}"
