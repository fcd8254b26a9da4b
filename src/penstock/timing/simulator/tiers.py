"""When stages come into memory and have left it: a rank's reader and its writer, beside compute."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedule.op import BACKWARD, FETCHES, LEAVES, STASHES, Kind, Op
from penstock.schedule.residence import NEED_WEIGHTS, stays_of
from penstock.timing.costs import Costs
from penstock.timing.spans import ALL_OF_STAGE, Transfer, TransferKind


class Tiers:
    """What one rank reads and writes.

    A fetch begins when the one before has ended and the stage's last write is done; a leave waits
    until what left before it is written, whose room comes back then. Both cost the rank no more
    than such waits. What microbatches keep goes the same ways.

    Args:
        ops: the rank's.
        costs: how long reading and writing takes.
        rank: its number.
        num_slices: of a microbatch; each takes its share.

    Attributes:
        transfers: what has kept reader and writer busy so far.
    """

    def __init__(self, ops: Sequence[Op], costs: Costs, rank: int = 0, num_slices: int = 1) -> None:
        self.transfers: list[Transfer] = []
        self._rank = rank
        self._stays = stays_of(ops)
        self._costs = costs
        self._read_until = self._written_until = 0.0
        self._there: dict[int, float] = {}
        self._state_there: dict[int, float] = {}
        self._updated: set[int] = set()
        """Stages that are here for an update whose state has not begun to come."""
        self._written: dict[int, float] = {}
        self._num_slices = num_slices
        self._stash_written = 0.0
        self._stash_there: dict[Op, float] = {}
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
            self._note("write", op.stage, ALL_OF_STAGE, ready, self._written_until)
        elif op.kind in STASHES:
            ready = max(ready, self._stash_written)
            self._move_stash(op, ready)
        elif op.kind in NEED_WEIGHTS:
            if op.kind in BACKWARD:
                fetch = op._replace(kind=Kind.FETCH_STASH)
                ready = max(ready, self._stash_there.pop(fetch, 0.0))
            ready = max(ready, self._there.get(op.stage, 0.0))
            if op.kind is Kind.BACKWARD and op.stage in self._updated:
                self._updated.discard(op.stage)
                begin = max(ready, self._read_until, self._written.get(op.stage, 0.0))
                self._read_until = begin + self._costs.state_seconds(op.stage)
                self._state_there[op.stage] = self._read_until
                self._note("read", op.stage, ALL_OF_STAGE, begin, self._read_until)
            elif op.kind is Kind.UPDATE:
                ready = max(ready, self._state_there.get(op.stage, 0.0))
        return ready

    def _move_stash(self, op: Op, ready: float) -> None:
        took = self._costs.stash_seconds(op) / self._num_slices
        if op.kind is Kind.LEAVE_STASH:
            begin = max(ready, self._written_until)
            self._stash_written = self._written_until = begin + took
            self._note("write", op.stage, op.microbatch, begin, begin + took)
        else:  # all that has left is written
            begin = max(ready, self._read_until)
            self._stash_there[op] = self._read_until = begin + took
            self._note("read", op.stage, op.microbatch, begin, begin + took)

    def _fetch(self, op: Op, ready: float) -> None:
        took = self._costs.fetching(self._stays[op])
        if self._stays[op].updates:
            self._updated.add(op.stage)
        if op.stage in self._in_memory:
            self._in_memory.discard(op.stage)
            took -= self._costs.weights_seconds(op.stage)
        begin = max(ready, self._read_until, self._written.get(op.stage, 0.0))
        self._read_until = self._there[op.stage] = begin + took
        self._note("read", op.stage, ALL_OF_STAGE, begin, begin + took)

    def _note(self, kind: TransferKind, stage: int, number: int, start: float, end: float) -> None:
        if end > start:
            self.transfers.append(Transfer((self._rank,), kind, stage, number, start, end))
