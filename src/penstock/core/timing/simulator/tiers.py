"""When stages come into memory and have left it: a rank's reader and its writer, beside compute.

A reader brings one thing at a time, and first what is needed first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from penstock.core.schedule.op import BACKWARD, FETCHES, LEAVES, STASHES, Kind, Op
from penstock.core.schedule.residence import NEED_WEIGHTS, StageResidency, stays_of
from penstock.core.timing.costs import Costs
from penstock.core.timing.spans import ALL_OF_STAGE, Transfer, TransferKind

_Key = TypeVar("_Key")


class Tiers:
    """The reads and writes of one rank.

    A fetch can begin when the stage's last write is done; what an op needs first comes first
    (``Reader``). A leave waits until what left before it is written, whose room comes back then.
    Both cost the rank no more than such waits. What microbatches keep goes the same ways.

    Args:
        ops: the rank's.
        costs: how long reading and writing takes.
        rank: its number.
        num_slices: of a microbatch; each takes its share.
    """

    def __init__(self, ops: Sequence[Op], costs: Costs, rank: int = 0, num_slices: int = 1) -> None:
        self._transfers: list[Transfer] = []
        self._rank = rank
        self._stays = stays_of(ops)
        self._costs = costs
        self._num_slices = num_slices
        self._reader = Reader(self._note_read)
        self._written_until = 0.0
        self._places = {op: place for place, op in enumerate(ops) if op.kind in BACKWARD}
        self._coming: dict[int, Read] = {}
        self._state_coming: dict[int, Read] = {}
        self._updated: dict[int, StageResidency] = {}
        """Stages that are here for an update whose state has not begun to come."""
        self._written: dict[int, float] = {}
        self._stash_written = 0.0
        self._stash_coming: dict[Op, Read] = {}
        # A stage that stays behind the end of a minibatch is there when the next one begins.
        kept = [stay.stage for op, stay in self._stays.items() if op.kind in LEAVES and stay.keeps]
        self._in_memory = set(kept)

    @property
    def transfers(self) -> list[Transfer]:
        """All that has kept reader and writer busy, once all ops are through."""
        self._reader.finish()
        return self._transfers

    def ready(self, op: Op, ready: float) -> float:
        """When an op can begin that could begin at ``ready`` for all other reasons."""
        if op.kind in FETCHES:
            self._fetch(op, ready)
        elif op.kind in LEAVES:
            stay = self._stays[op]
            ready = max(ready, self._written_until, self._come(self._coming, op.stage))
            self._written_until = ready + self._costs.leaving(stay)
            self._written[op.stage] = self._written_until
            self._note("write", op.stage, ALL_OF_STAGE, ready, self._written_until)
        elif op.kind in STASHES:
            ready = max(ready, self._stash_written)
            self._move_stash(op, ready)
        elif op.kind in NEED_WEIGHTS:
            if op.kind in BACKWARD:
                fetch = op._replace(kind=Kind.FETCH_STASH)
                ready = max(ready, self._come(self._stash_coming, fetch))
            ready = max(ready, self._come(self._coming, op.stage))
            if op.kind is Kind.BACKWARD and op.stage in self._updated:
                self._fetch_state(op.stage, ready)
            elif op.kind is Kind.UPDATE:
                ready = max(ready, self._come(self._state_coming, op.stage))
        return ready

    def _come(self, coming: dict[_Key, Read], key: _Key) -> float:
        """When something is there, which is known from now on."""
        return self._reader.end_of(coming.pop(key)) if key in coming else 0.0

    def _move_stash(self, op: Op, ready: float) -> None:
        took = self._costs.stash_seconds(op) / self._num_slices
        if op.kind is Kind.LEAVE_STASH:
            begin = max(ready, self._written_until)
            self._stash_written = self._written_until = begin + took
            self._note("write", op.stage, op.microbatch, begin, begin + took)
        else:  # all that has left is written
            needed_at = self._needed_at(op)
            read = Read(op.stage, op.microbatch, needed_at, ready, took)
            self._stash_coming[op] = self._reader.ask(read)

    def _needed_at(self, fetch: Op) -> int:
        """The place of the backward for which a microbatch's activations come."""
        kinds = (kind for kind in BACKWARD if fetch._replace(kind=kind) in self._places)
        return self._places[fetch._replace(kind=next(kinds))]

    def _fetch(self, op: Op, ready: float) -> None:
        stay = self._stays[op]
        took = self._costs.fetching(stay)
        if stay.updates:
            self._updated[op.stage] = stay
        if op.stage in self._in_memory:
            self._in_memory.discard(op.stage)
            took -= self._costs.weights_seconds(op.stage)
        self._coming[op.stage] = self._ask(op.stage, stay.needed_at, ready, took)

    def _fetch_state(self, stage: int, ready: float) -> None:
        updated_at = self._updated.pop(stage).updated_at
        took = self._costs.state_seconds(stage)
        self._state_coming[stage] = self._ask(stage, updated_at, ready, took)

    def _ask(self, stage: int, needed_at: int, ready: float, took: float) -> Read:
        release = max(ready, self._written.get(stage, 0.0))
        return self._reader.ask(Read(stage, ALL_OF_STAGE, needed_at, release, took))

    def _note_read(self, read: Read, start: float, end: float) -> None:
        self._note("read", read.stage, read.number, start, end)

    def _note(self, kind: TransferKind, stage: int, number: int, start: float, end: float) -> None:
        if end > start:
            self._transfers.append(Transfer((self._rank,), kind, stage, number, start, end))


@dataclass(eq=False)
class Read:
    """Something that is to come.

    Attributes:
        stage, number: whose it is, as ``Transfer`` has it.
        needed_at: the place, among the rank's ops, of the first one that needs it.
        release: before when it cannot begin.
        left: how long it still takes.
        end: when it has come; ``None`` as long as nobody knows.
    """

    stage: int
    number: int
    needed_at: int
    release: float
    left: float
    end: float | None = None


class Reader:
    """Reads what is needed first, and goes on later with what it has begun, as ``weights.lane``
    does: so nothing ever comes later because something else was asked for early.

    Times are found when somebody asks for them: until then what was asked for meanwhile may come
    first. Who waits for one thing asks for no other before it has come.

    Args:
        note: told of each stretch in which something comes: what, from when to when.
    """

    def __init__(self, note: Callable[[Read, float, float], None]) -> None:
        self._note = note
        self._asked: list[Read] = []
        self._free = 0.0

    def ask(self, read: Read) -> Read:
        """Let something come; gives it back."""
        self._asked.append(read)
        return read

    def end_of(self, read: Read) -> float:
        """When something has come."""
        while read.end is None:
            self._go_on()
        return read.end

    def finish(self) -> None:
        """Let all come that was asked for."""
        while self._asked:
            self._go_on()

    def _go_on(self) -> None:
        begin = max(self._free, min(read.release for read in self._asked))
        chosen = min(
            (read for read in self._asked if read.release <= begin),
            key=lambda read: read.needed_at,
        )
        more_urgent = min(
            (
                read.release
                for read in self._asked
                if read.release > begin and read.needed_at < chosen.needed_at
            ),
            default=inf,
        )
        end = begin + chosen.left
        if end <= more_urgent:
            self._asked.remove(chosen)
            chosen.end = end
        else:
            end = more_urgent
            chosen.left -= end - begin
        self._free = end
        self._note(chosen, begin, end)
