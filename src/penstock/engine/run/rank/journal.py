"""What a rank has done last and what it does now, for whoever must find out why a job stands."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from penstock.core.schedule import Op
from penstock.engine.device.queue import Stamps

NUM_SHOWN = 10

_NO_WAITS: Mapping[Op, str] = MappingProxyType({})


class Journal:
    """When a rank's ops began and ended in one minibatch; written by its thread, read by any.

    Args:
        ops: the rank's, in their order.
        waiting: what ops that receive wait for.
        stamps: where the ops happen on an accelerator, what tells when; the rank's thread only sees
            when it asks for them.

    Attributes:
        ops, stamps: as given.
        starts: when each op began that has, in seconds of this host's monotonic clock.
        ends: when each ended that has.
        note_start, note_end: to be told when an op begins and ends.
    """

    def __init__(
        self,
        ops: Sequence[Op] = (),
        waiting: Mapping[Op, str] = _NO_WAITS,
        stamps: Stamps | None = None,
    ) -> None:
        self.ops = ops
        self.stamps = stamps
        self.starts = array("d")
        self.ends = array("d")
        self.note_start: Callable[[float], None] = self.starts.append
        self.note_end: Callable[[float], None] = self.ends.append
        if stamps is not None:
            self.note_start = partial(_note, self.starts, stamps)
            self.note_end = partial(_note, self.ends, stamps)
        self._waiting = waiting

    def waited(self) -> None:
        """What the op that has begun needs has come only now: its time begins here, and the rank
        was idle before."""
        self.starts[-1] = time.perf_counter()
        if self.stamps is not None:
            self.stamps.put_off()

    def end(self) -> None:
        """The minibatch has ended, well or not: nothing is waited for any more."""
        self._waiting = _NO_WAITS

    @property
    def current(self) -> Op | None:
        """The op that is being performed, or that has failed."""
        num_done = len(self.ends)
        return self.ops[num_done] if len(self.starts) > num_done else None

    def text(self, rank: int) -> str:
        """One line: the last ops, and what the rank does now."""
        num_done = len(self.ends)
        last = self.ops[max(0, num_done - NUM_SHOWN) : num_done]
        done = " ".join(map(str, last)) or "nothing"
        if len(self.starts) <= num_done:
            return f"rank {rank}: did {done}; idle"
        op, seconds = self.ops[num_done], time.perf_counter() - self.starts[num_done]
        doing = f"at {op} for {seconds:.3g} s"
        if op in self._waiting:
            doing += f" ({self._waiting[op]})"
        return f"rank {rank}: did {done}; {doing}"


def _note(column: array[float], stamps: Stamps, seconds: float) -> None:
    column.append(seconds)
    stamps.add()
