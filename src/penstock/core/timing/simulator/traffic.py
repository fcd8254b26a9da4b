"""When results get to other ranks: messages, one at a time where links are busy, and sums."""

from __future__ import annotations

from penstock.core.schedule.op import Kind, Op
from penstock.core.schedule.schedule import Schedule
from penstock.core.timing.costs import Costs
from penstock.core.timing.simulator.sums import Sums
from penstock.core.timing.spans import Transfer, TransferKind


class Traffic:
    """All that passes between ranks.

    Attributes:
        sums: the exchanges of gradients part by part; ``None`` where there are none.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule = schedule
        self._costs = costs
        self._links = Links(schedule, costs) if costs.has_busy_links else None
        self.sums = Sums(schedule, costs) if costs.has_exchanges else None

    def arrival(self, rank: int, needed: Op, op: Op, end: float) -> float:
        """When the result of ``needed``, made until ``end``, is usable for an op of ``rank``."""
        if self.sums is not None and op.kind is Kind.UPDATE and needed.kind is Kind.REDUCE:
            there = self.sums.there(op)
            if there is not None:
                return max(end, there)
        if self._schedule.where[needed] == rank:
            return end
        left = end if self._links is None else self._links.left.get(needed, end)
        return left + self._costs.delay(needed, op)

    def follow(self, rank: int, op: Op, start: float, end: float) -> None:
        """An op has run: let its result go where it is needed."""
        if self._links is not None:
            self._links.send(rank, op, end)
        if self.sums is not None:
            self.sums.follow(op, start, end)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """What kept links busy."""
        carried = self._links.transfers if self._links is not None else []
        summed = self.sums.transfers if self.sums is not None else []
        return tuple(sorted([*carried, *summed]))


class Links:
    """When each message begins its way, where links carry one at a time.

    Attributes:
        left: when the result of an op began its way.
        transfers: what kept links busy so far.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule = schedule
        self._costs = costs
        self._free: dict[tuple[int, int], float] = {}
        self._reader = {
            needed: op
            for op, rank in schedule.where.items()
            if op.kind is not Kind.UPDATE  # sums of gradients go another way
            for needed in schedule.dependencies(op)
            if schedule.where.get(needed, rank) != rank
        }
        self.left: dict[Op, float] = {}
        self.transfers: list[Transfer] = []

    def send(self, rank: int, op: Op, end: float) -> None:
        """Put the result of an op of ``rank`` on its way, if another rank gets it."""
        if op in self._reader:
            reader = self._reader[op]
            target = self._schedule.where[reader]
            left = max(end, self._free.get((rank, target), 0.0))
            self.left[op] = left
            until = left + self._costs.occupies(min(op.stage, reader.stage))
            self._free[rank, target] = until
            kind: TransferKind = "gradient" if reader.stage < op.stage else "value"
            self.transfers.append(
                Transfer((rank, target), kind, op.stage, op.microbatch, left, until)
            )
