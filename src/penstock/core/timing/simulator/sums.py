"""Sums of gradients: parts leave while backwards run, and links take turns.

Where servers sum, each has its part of a copy's gradients from when they begin to leave until the
copy has what it makes of them: sums, behind which the copy updates, or the weights that it has
updated itself. ``Served`` shows that in a timeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.core.schedule.op import RELEASING, Kind, Op
from penstock.core.schedule.schedule import Schedule
from penstock.core.timing.costs import Costs, Exchange, flow_shop
from penstock.core.timing.spans import Row, Transfer
from penstock.core.timing.timeline import Timeline


@dataclass(frozen=True)
class Served:
    """Which stages hand their gradients to servers.

    Attributes:
        counts: of each stage, how many servers take part; 0 where its ranks sum alone.
        updates: whether servers update as well, so that weights come back.
    """

    counts: tuple[int, ...] = ()
    updates: bool = False

    def shown_in(self, timeline: Timeline) -> Timeline:
        """A predicted timeline with a transfer per server, rank and update."""
        if not any(self.counts):
            return timeline
        first: dict[tuple[int, int], float] = {}
        for part in timeline.transfers:
            if part.kind == "sum":
                for rank in part.ranks:
                    key = rank, part.stage
                    first[key] = min(part.start, first.get(key, part.start))
        served = [
            transfer
            for rank, row in enumerate(timeline.rows)
            for transfer in self._of(rank, row, first)
        ]
        return replace(timeline, transfers=tuple(sorted([*timeline.transfers, *served])))

    def _of(self, rank: int, row: Row, first: dict[tuple[int, int], float]) -> Iterator[Transfer]:
        """Of one rank; the parts of its first sum may have left before it had handed in all."""
        since: dict[int, float] = {}
        for op, start, end in zip(row.ops, row.starts, row.ends, strict=True):
            if op.kind is Kind.REDUCE:
                since[op.stage] = min(first.pop((rank, op.stage), end), end)
            elif op.kind is Kind.UPDATE and op.stage in since:
                begun, until = since.pop(op.stage), end if self.updates else start
                for server in range(self.counts[op.stage]):
                    yield Transfer((rank,), "served", op.stage, server, begun, until)


class Sums:
    """The exchanges of all stages that have copies.

    A part can be summed when the last copy has made it. Parts of P are taken to be made evenly
    during the last backward (or W) of a copy, and the last one leaves when the copy hands in. An
    exchange begins when the links of all of its ranks are done with those before it; of several
    that are known, the one whose first part is there first goes first.

    Args:
        schedule: with the ops that hand in gradients.
        costs: how long exchanges take.

    Attributes:
        transfers: what passes the first thing, as far as it is known.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule = schedule
        self._costs = costs
        self._free: dict[int, list[float]] = {}
        self._handed_in: dict[Op, tuple[float, ...]] = {}
        self._times: dict[Op, tuple[float, float]] = {}
        self._there: dict[frozenset[Op], float] = {}
        self._waiting: dict[frozenset[Op], Exchange] = {}
        self.transfers: list[Transfer] = []
        updates = schedule.columns.ops(np.flatnonzero(schedule.columns.are_of({Kind.UPDATE})))
        for update in updates:
            exchange = costs.exchange(update.stage)
            handed = frozenset() if exchange is None else self._of(update)
            # Weights that are tied to other stages' are summed in one, when all are there.
            alone = {op.stage for op in handed} == {update.stage}
            if exchange is not None and alone and len(handed) > 1:
                self._waiting[handed] = exchange

    def _of(self, update: Op) -> frozenset[Op]:
        """The ops with which all copies hand in what an update waits for."""
        needed = self._schedule.dependencies(update)
        return frozenset(op for op in needed if op.kind is Kind.REDUCE)

    def follow(self, op: Op, start: float, end: float) -> None:
        """An op has run. If a copy hands in with it, its parts were made before."""
        if op.kind in RELEASING:
            self._times[op] = start, end
        exchange = self._costs.exchange(op.stage)
        if exchange is None or op.kind is not Kind.REDUCE:
            return
        makers = [self._times.get(need, (end, end)) for need in self._schedule.dependencies(op)]
        begun, done = max(makers, key=lambda span: span[1], default=(end, end))
        count = exchange.num_parts
        made = [min(begun + (done - begun) * (part + 1) / count, end) for part in range(count)]
        made[-1] = end
        self._handed_in[op] = tuple(made)

    def in_parts(self, op: Op) -> bool:
        """Whether an op waits for a sum that is exchanged in parts."""
        return op.kind is Kind.UPDATE and self._of(op) in self._waiting

    def there(self, update: Op) -> float | None:
        """When the sum for an update is there; ``None`` where it is not exchanged in parts."""
        handed = self._of(update)
        if handed not in self._there and handed in self._waiting:
            known = [own for own in self._waiting if all(op in self._handed_in for op in own)]
            for own in sorted(known, key=self._first):
                self._exchange(own, self._waiting.pop(own))
        return self._there.get(handed)

    def _made(self, handed: frozenset[Op]) -> list[float]:
        """When the last copy has made each part."""
        return [max(times) for times in zip(*(self._handed_in[op] for op in handed), strict=True)]

    def _first(self, handed: frozenset[Op]) -> tuple[float, int]:
        return self._made(handed)[0], min(handed).stage

    def _exchange(self, handed: frozenset[Op], exchange: Exchange) -> None:
        ranks: Sequence[int] = sorted({self._schedule.where[op] for op in handed})
        idle = [0.0] * len(exchange.seconds)
        columns = [self._free.get(rank, idle) for rank in ranks]
        # Stages whose parts pass different things share those that they have in common.
        free = [max(each) for each in zip(*(_padded(own, idle) for own in columns), strict=True)]
        passes = flow_shop(self._made(handed), exchange.seconds, free)
        until = [end for _, end in passes[-1]]
        for rank in ranks:
            self._free[rank] = until
        stage = min(handed).stage
        self.transfers += [
            Transfer(tuple(ranks), "sum", stage, part, *spans[0])
            for part, spans in enumerate(passes)
        ]
        self._there[handed] = until[-1] + exchange.once


def _padded(times: Sequence[float], like: Sequence[float]) -> list[float]:
    return [*times[: len(like)], *like[len(times) :]]
