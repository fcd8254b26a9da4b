"""Surroundings of the ranks of a simulation: the network, tiers, and a live source.

Where servers sum, each has its part
of a copy's gradients from when they begin to leave until the copy has what it makes of them: sums,
behind which the copy updates, or the weights that it has updated itself. ``Served`` shows that in a
timeline. A source gives a frame now and then; ``Arrivals`` says how many of them are let in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil, inf

from penstock.base.errors import InputError
from penstock.base.values import is_number, shown
from penstock.core.schedule.durations import Durations
from penstock.core.schedule.needs import Needs
from penstock.core.schedule.op import RESIDENCE, STASHES, Kind, Op
from penstock.core.schedule.schedule import Schedule
from penstock.core.timing.costs import Costs
from penstock.core.timing.simulator.network import Links, Roads, Sums
from penstock.core.timing.simulator.passage import Event, Sources
from penstock.core.timing.simulator.tiers import Tiers
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
    """Things that go on beside the ranks, and may make an op wait: links, cards, sums, tiers, a
    source. All but ``ready`` happen in the order of time.

    Args:
        schedule: whose ranks.
        costs: of it.
        arrivals: when frames come, where they come from a live source.
    """

    def __init__(self, schedule: Schedule, costs: Costs, arrivals: Arrivals | None) -> None:
        self._ops = [op for ops in schedule.ranks for op in ops]
        self._admits: dict[int, int] = {}
        if arrivals is not None and arrivals.waits_for:
            number = {op: number for number, op in enumerate(self._ops)}
            pairs = arrivals.waits_for.items()
            self._admits = {number[op]: number[other] for op, other in pairs}
        self._arrivals = arrivals
        roads = Roads(costs.cards, costs.hosts)
        self._links = Links(schedule.columns, costs, roads) if costs.has_busy_links else None
        self._sums = Sums(schedule, costs, roads) if costs.has_exchanges else None
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
        if self._sums is not None:
            for op, needs in sources.items():
                if self._sums.in_parts(self._ops[op]):
                    sources[op] = [(need, self._late(need, late)) for need, late in needs]
        return sources

    def _late(self, need: int, late: float) -> float:
        handed_in = need < len(self._ops) and self._ops[need].kind is Kind.REDUCE
        return 0.0 if handed_in else late

    def ready(self, rank: int, number: int, ready: float) -> float:
        """When the next op of a rank can begin that could begin at ``ready`` for all other reasons;
        asked once, when all that it needs is there or under way."""
        op = self._ops[number]
        if self._arrivals is not None:
            ready = max(ready, self._arrivals.time_of(op))
        tier = self._tiers[rank]
        return ready if tier is None else tier.ready(op, ready)

    def held_until(self, number: int) -> float:
        """When an op can begin that is about to; it is asked again then."""
        return 0.0 if self._sums is None else self._sums.there(self._ops[number])

    def begun(self, number: int, start: float, end: float) -> Iterable[Event]:
        """An op has begun; gives what happens in consequence, and when."""
        return () if self._sums is None else self._sums.begun(self._ops[number], start, end)

    def follow(self, number: int, end: float) -> tuple[float, Iterable[Event]]:
        """An op has ended; gives when its result begins its way to other ranks, and what happens in
        consequence."""
        handed = () if self._sums is None else self._sums.handed_in(self._ops[number], end)
        return end if self._links is None else self._links.send(number, end), handed

    def happen(self, number: int, time: float) -> None:
        """Something happens that was given by its number."""
        assert self._sums is not None, "nothing else makes things happen"
        self._sums.pass_part(number, time)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """All that kept links and tiers busy, once all ops are through."""
        carried = self._links.transfers if self._links is not None else []
        summed = self._sums.transfers if self._sums is not None else []
        stored = [
            transfer for tier in self._tiers if tier is not None for transfer in tier.transfers
        ]
        return tuple(sorted([*carried, *summed, *stored]))
