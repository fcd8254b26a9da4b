"""When stages come into memory and have left it: a rank's reader and its writer, beside compute."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedule.op import FETCHES, LEAVES, Kind, Op
from penstock.schedule.residence import NEED_WEIGHTS, stays_of
from penstock.timing.costs import Costs


class Tiers:
    """What one rank reads and writes.

    A fetch begins when the one before has ended and the stage's last write is done; a leave waits
    until what left before it is written, whose room comes back then. Both cost the rank no more
    than such waits.

    Args:
        ops: the rank's.
        costs: how long reading and writing takes.
    """

    def __init__(self, ops: Sequence[Op], costs: Costs) -> None:
        self._stays = stays_of(ops)
        self._costs = costs
        self._read_until = self._written_until = 0.0
        self._there: dict[int, float] = {}
        self._state_there: dict[int, float] = {}
        self._updated: set[int] = set()
        """Stages that are here for an update whose state has not begun to come."""
        self._written: dict[int, float] = {}
        # A stage that stays behind the end of a minibatch is there when the next one begins.
        kept = [stay.stage for op, stay in self._stays.items() if op.kind in LEAVES and stay.keeps]
        self._in_memory = set(kept)

    def ready(self, op: Op, ready: float) -> float:
        """When an op can begin that could begin at ``ready`` for all other reasons."""
        if op.kind in FETCHES:
            self._fetch(op, ready)
        elif op.kind in LEAVES:
            stay = self._stays[op]
            ready = max(ready, self._written_until)
            self._written_until = ready + self._costs.leaving(stay)
            self._written[op.stage] = self._written_until
        elif op.kind in NEED_WEIGHTS:
            ready = max(ready, self._there.get(op.stage, 0.0))
            if op.kind is Kind.BACKWARD and op.stage in self._updated:
                self._updated.discard(op.stage)
                self._read_until = max(ready, self._read_until, self._written.get(op.stage, 0.0))
                self._read_until += self._costs.state_seconds(op.stage)
                self._state_there[op.stage] = self._read_until
            elif op.kind is Kind.UPDATE:
                ready = max(ready, self._state_there.get(op.stage, 0.0))
        return ready

    def _fetch(self, op: Op, ready: float) -> None:
        took = self._costs.fetching(self._stays[op])
        if self._stays[op].updates:
            self._updated.add(op.stage)
        if op.stage in self._in_memory:
            self._in_memory.discard(op.stage)
            took -= self._costs.weights_seconds(op.stage)
        begin = max(ready, self._read_until, self._written.get(op.stage, 0.0))
        self._read_until = self._there[op.stage] = begin + took
