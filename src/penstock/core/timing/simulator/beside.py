"""Surroundings of the ranks of a simulation: links, sums of gradients, tiers, and a live source.

A source gives a frame now and then; ``Arrivals`` says how many of its frames are let in.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

import numpy as np

from penstock.base.errors import InputError
from penstock.base.values import is_number, shown
from penstock.core.schedule.columns.columns import Columns
from penstock.core.schedule.columns.needs import Needs, Numbers
from penstock.core.schedule.durations import Durations
from penstock.core.schedule.op import RESIDENCE, STASHES, Kind, Op
from penstock.core.schedule.schedule import Schedule
from penstock.core.timing.costs import Costs
from penstock.core.timing.simulator.passage import Sources
from penstock.core.timing.simulator.sums import Sums
from penstock.core.timing.simulator.tiers import Tiers
from penstock.core.timing.spans import Transfer, TransferKind

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Arrivals:
    """When the frames of a stream may enter the first stage.

    Attributes:
        period: from one frame to the next; the first comes at 0.
        waits_for: for the first forward of a frame, the last one of an earlier frame, which must
            have left before.
    """

    period: float
    waits_for: dict[Op, Op]

    @classmethod
    def of(cls, schedule: Schedule, costs: Durations, rate: float) -> Arrivals:
        """The arrivals from a source of so many frames per unit of time.

        A live stream (one whose backwards go through the newest activations) has at most as many
        frames inside as it has stages: more would queue between stages, where each makes all later
        ones late, and none comes out sooner. Only where hops are so long that this would cost
        frames there are as many more as the rate takes. By Little's law, a frame is then inside for
        as many ticks as there are stages, at most. Of other schedules, all may be inside.

        Raises:
            InputError: the rate is no number > 0.
        """
        if not is_number(rate) or not 0 < rate < inf or not 1 / rate < inf:
            raise InputError(
                f"arrivals is {shown(rate)}; give how many frames arrive per second, a number > 0"
            )
        waits_for: dict[Op, Op] = {}
        if schedule.activations == "newest":
            last, part = schedule.num_stages - 1, schedule.num_slices - 1
            inside = _inside(schedule, costs, float(rate))
            for frame in range(inside, schedule.num_microbatches):
                waits_for[Op(0, Kind.FORWARD, frame)] = Op(last, Kind.FORWARD, frame - inside, part)
        return cls(1 / rate, waits_for)

    def time_of(self, op: Op) -> float:
        """Before which an op cannot start, because its frame is not there."""
        return self.period * op.microbatch if op.kind is Kind.FORWARD and op.stage == 0 else 0.0


def _inside(schedule: Schedule, costs: Durations, rate: float) -> int:
    """How many frames may be between their first and their last forward."""
    stages = range(schedule.num_stages)
    forwards = [Op(stage, Kind.FORWARD, 0) for stage in stages]
    hops = sum(map(costs.delay, forwards, forwards[1:]))
    through = sum(map(costs.duration, forwards)) + hops
    # A rank that is busy for a tick with each frame lets no more through, whatever arrives.
    busiest = max(sum(map(costs.duration, ops)) for ops in schedule.ranks)
    most = min(rate, schedule.num_microbatches / busiest) if busiest else rate
    return max(schedule.num_stages, ceil(through * most * (1 - _ROUNDING)))


MOVES = RESIDENCE | STASHES


class Surroundings:
    """All of it, as ``passage.Beside`` wants it.

    Args:
        schedule: whose ranks.
        costs: of it.
        arrivals: when frames come, where they come from a live source.

    Attributes:
        sums: the exchanges of gradients part by part; ``None`` where there are none.
    """

    def __init__(self, schedule: Schedule, costs: Costs, arrivals: Arrivals | None) -> None:
        self._ops = [op for ops in schedule.ranks for op in ops]
        self._admits: dict[int, int] = {}
        if arrivals is not None and arrivals.waits_for:
            number = {op: number for number, op in enumerate(self._ops)}
            pairs = arrivals.waits_for.items()
            self._admits = {number[op]: number[other] for op, other in pairs}
        self._arrivals = arrivals
        self._links = Links(schedule.columns, costs) if costs.has_busy_links else None
        self.sums = Sums(schedule, costs) if costs.has_exchanges else None
        self._tiers = [
            Tiers(ops, costs, rank, schedule.num_slices) if MOVES & own.kinds else None
            for rank, (ops, own) in enumerate(zip(schedule.ranks, schedule.rank_ops, strict=True))
        ]

    def with_admissions(self, needs: Needs) -> Needs:
        """The needs of ops, where a frame is let in when another one has left."""
        if not self._admits:
            return needs
        single, several = needs.single.copy(), dict(needs.several)
        for op, other in self._admits.items():
            several[op] = [*needs.of(op), other]
            single[op] = needs.absent
        return Needs(single, several, needs.nothing, needs.absent)

    def undelayed(self, sources: Sources) -> Sources:
        """Results are under way as long as ``sources`` say, but that a frame is let in at once, and
        that sums say themselves when they are there."""
        sources = dict(sources)
        for op, other in self._admits.items():
            sources[op] = [(need, 0.0 if need == other else late) for need, late in sources[op]]
        if self.sums is not None:
            for op, needs in sources.items():
                if self.sums.in_parts(self._ops[op]):
                    sources[op] = [(need, self._late(need, late)) for need, late in needs]
        return sources

    def _late(self, need: int, late: float) -> float:
        handed_in = need < len(self._ops) and self._ops[need].kind is Kind.REDUCE
        return 0.0 if handed_in else late

    def ready(self, rank: int, number: int, ready: float) -> float:
        """See ``Beside``."""
        op = self._ops[number]
        if self._arrivals is not None:
            ready = max(ready, self._arrivals.time_of(op))
        if self.sums is not None and op.kind is Kind.UPDATE:
            ready = max(ready, self.sums.there(op) or 0.0)
        tier = self._tiers[rank]
        return ready if tier is None else tier.ready(op, ready)

    def follow(self, rank: int, number: int, start: float, end: float) -> float:
        """See ``Beside``."""
        op = self._ops[number]
        if self.sums is not None:
            self.sums.follow(op, start, end)
        return end if self._links is None else self._links.send(number, end)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """All that kept links and tiers busy, once all ops are through."""
        carried = self._links.transfers if self._links is not None else []
        summed = self.sums.transfers if self.sums is not None else []
        stored = [
            transfer for tier in self._tiers if tier is not None for transfer in tier.transfers
        ]
        return tuple(sorted([*carried, *summed, *stored]))


class Links:
    """When each message begins its way, where links carry one at a time.

    Attributes:
        transfers: what kept links busy so far.
    """

    def __init__(self, columns: Columns, costs: Costs) -> None:
        self._costs = costs
        self._free: dict[tuple[int, int], float] = {}
        reader = np.full(columns.count, -1, np.int64)
        for kind, ops, needs in Numbers(columns).rule():
            for need in needs if kind is not Kind.UPDATE else ():  # sums go another way
                there = need < columns.count
                crosses = there & (columns.rank[np.where(there, need, 0)] != columns.rank[ops])
                np.maximum.at(reader, need[crosses], ops[crosses])
        fields = reader, columns.rank, columns.stage, columns.microbatch
        self._reader, self._rank, self._stage, self._microbatch = (each.tolist() for each in fields)
        self.transfers: list[Transfer] = []

    def send(self, number: int, end: float) -> float:
        """Put the result of an op on its way, if another rank gets it; gives when."""
        reader = self._reader[number]
        if reader < 0:
            return end
        link = self._rank[number], self._rank[reader]
        stage, target = self._stage[number], self._stage[reader]
        left = max(end, self._free.get(link, 0.0))
        until = self._free[link] = left + self._costs.occupies(min(stage, target))
        kind: TransferKind = "gradient" if target < stage else "value"
        self.transfers.append(Transfer(link, kind, stage, self._microbatch[number], left, until))
        return left
