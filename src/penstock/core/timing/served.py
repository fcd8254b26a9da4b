"""``Served``: what servers have of the gradients of copies, and until when, as a timeline shows it.

A server has its part of a copy's gradients from when they begin to leave until the copy has what it
makes of them: sums, behind which the copy updates, or the weights that it has updated itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.core.schedule.op import Kind
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
        for one in timeline.transfers:
            if one.kind == "sum":
                for rank in one.ranks:
                    key = rank, one.stage
                    first[key] = min(one.start, first.get(key, one.start))
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
