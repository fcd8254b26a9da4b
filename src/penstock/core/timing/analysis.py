"""A timeline explains itself: where ranks idle, what ops cost, where it parts from a prediction.

Idle time comes from the schedule, from slow peers, or from messages. A gap has no single cause. A
rank may wait for a message that left late because its sender waited for a slow op elsewhere, and a
message that is late may cost nothing, because its receiver would have had to wait for something
else anyway. So the step is thought through again, in the same order of ops, with one cause left out
after the other. A rank's idle time is the length of the step without its own work; three steps are
compared:

1. every op takes its usual time, messages take none, all ranks begin at once;
2. every op takes the time it really took, every rank begins when it really began, messages and
   whatever else passes between two ops take no time;
3. the step as it is.

The idle time of the first is *bubble*: the order of the schedule forces it, in warm-up, cool-down
and between stages of different lengths. What the second adds is *waiting* for a peer that was
slower than usual or began late. What the third adds is *communication*: from the end of an op until
its result is usable elsewhere, sending and unpacking included, as far as compute does not hide it.

Where a measured timeline parts from its prediction, the first op that departs is named, as all
later ones may only have inherited it. If it started at another time than predicted, the walk goes
back over whatever it followed directly, the op before it on its rank or the one on another rank
whose result it needed last. Along that way, what ops and the pauses between them took longer adds
up to the delay, and the largest part of it is the cause.

``rank_shares`` says of each rank how much it works, and which straggle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, repeat
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from penstock.base.errors import InputError
from penstock.core.schedule.needs import needs_of
from penstock.core.schedule.op import COMMUNICATION, COMPUTE, RECEIVES, SENDS, Kind, Op
from penstock.core.schedule.schedule import Schedule
from penstock.core.timing.costs import Costs
from penstock.core.timing.simulator.passage import go_through
from penstock.core.timing.spans import BUSY, Span
from penstock.core.timing.timeline import Timeline


def _usual_lengths(timeline: Timeline) -> dict[Op, float]:
    """For every op that counts as work, the median length of its kind, stage and rank."""
    alike: dict[tuple[int, int, Kind], list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.op.kind in BUSY:
            alike[span.rank, span.op.stage, span.op.kind].append(span)
    usual: dict[Op, float] = {}
    for spans in alike.values():
        length = median(span.end - span.start for span in spans)
        usual.update((span.op, length) for span in spans)
    return usual


def measured_costs(timeline: Timeline) -> Costs:
    """The costs of every stage as a timeline shows them, to simulate this or another schedule with.

    Each is a median over the microbatches; an op that a stage never ran costs 0. Where backwards
    are not split, nobody can see how long the halves take, and each is given half.

    A hop is seen best where the receiver was waiting already when the sender's op ended: from that
    end until the result was usable, both directions together. Where no receiver of an edge ever
    waited so early, the quickest message is the best bound.

    Args:
        timeline: a whole minibatch, predicted or measured. Without receive ops, hops are seen
            only where a rank stood idle before an op.

    Raises:
        ScheduleError: it lacks ops that others need.
    """
    lengths = _lengths(timeline)
    stages = range(timeline.schedule.num_stages)

    def each(kind: Kind) -> list[float]:
        return [lengths.get((stage, kind), 0.0) for stage in stages]

    inputs, weights = each(Kind.BACKWARD_INPUT), each(Kind.BACKWARD_WEIGHT)
    forward = each(Kind.FORWARD)
    for stage, full in enumerate(each(Kind.BACKWARD)):
        if not inputs[stage] and not weights[stage]:
            inputs[stage] = weights[stage] = full / 2
    recomputes = any(kind is Kind.RECOMPUTE for _, kind in lengths)
    delays = _delays(timeline)
    return Costs(
        forward,
        inputs,
        weights,
        hop=[delays.get((stage, False), 0.0) for stage in stages],
        update=each(Kind.UPDATE),
        recompute=[
            lengths.get((stage, Kind.RECOMPUTE), forward[stage]) for stage in stages
        ] if recomputes else None,
        reduce=[delays.get((stage, True), 0.0) for stage in stages],
    )  # fmt: skip


def _lengths(timeline: Timeline) -> dict[tuple[int, Kind], float]:
    """The median length of every kind of work of every stage, for a whole microbatch."""
    alike: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for span in timeline.spans:
        if span.op.kind in BUSY:
            alike[span.op.stage, span.op.kind].append(span.end - span.start)
    return {
        (stage, kind): median(lengths) * (1 if kind is Kind.UPDATE else timeline.num_slices)
        for (stage, kind), lengths in alike.items()
    }


class _Delivery(NamedTuple):
    """A result that came from another rank: made at ``made``, awaited from ``awaited`` on, and
    usable at ``usable``."""

    made: float
    awaited: float
    usable: float


def _delays(timeline: Timeline) -> Mapping[tuple[int, bool], float]:
    """How long results take to other ranks: by edge between stages, and by stage for the sums of
    gradients, which the second part of the key tells."""
    alike: dict[tuple[int, bool], list[_Delivery]] = defaultdict(list)
    for key, delivery in _deliveries(timeline):
        alike[key].append(delivery)
    delays = {}
    for key, deliveries in alike.items():
        awaited_early = [d.usable - d.made for d in deliveries if d.awaited <= d.made]
        quickest = min(delivery.usable - delivery.made for delivery in deliveries)
        # Where clocks disagree, a message may seem to arrive before it is sent.
        delays[key] = max(median(awaited_early) if awaited_early else quickest, 0.0)
    return delays


def _deliveries(timeline: Timeline) -> Iterator[tuple[tuple[int, bool], _Delivery]]:
    schedule = timeline.schedule
    end = {span.op: span.end for span in timeline.spans}
    for rank, spans in enumerate(timeline.by_rank):
        free = 0.0
        for span in spans:
            made = [end[maker] for maker in _makers(schedule, span.op, rank) if maker in end]
            if made:
                sums = span.op.kind is Kind.UPDATE
                needed = schedule.dependencies(span.op)
                first_stage = min(op.stage for op in (span.op, *needed))
                receives = span.op.kind in RECEIVES
                # A receive's span is its wait; any other op waits before it starts.
                window = (span.start, span.end) if receives else (free, span.start)
                yield (first_stage, sums), _Delivery(max(made), *window)
            free = span.end


def _makers(schedule: Schedule, op: Op, rank: int) -> Iterator[Op]:
    """The ops on other ranks that make what ``op`` needs; behind a send, the op whose result it
    sends."""
    for needed in schedule.dependencies(op):
        if schedule.where.get(needed, rank) != rank:
            sends = needed.kind in SENDS
            yield schedule.dependencies(needed)[0] if sends else needed


_ROUNDING = 1e-9
"""The share of the makespan by which sums of the same times in another order may differ."""


class Idle(NamedTuple):
    """The idle time of one rank during a step, in the unit of its timeline; each part is ≥ 0.

    Attributes:
        bubble: what the schedule's order forces, were messages free and every op as long as usual.
        waiting: what slow ops and late starts of peers add.
        communication: what messages add. They make the step longer for all ranks, so that it is
            the same on each, unless clocks disagree.
    """

    bubble: float
    waiting: float
    communication: float

    @property
    def total(self) -> float:
        """All idle time of the rank."""
        return sum(self)


def idle_of(timeline: Timeline) -> tuple[Idle, ...]:
    """Split the idle time of every rank; the parts add up to the makespan without its busy time.

    An op's usual time is the median of its kind, stage and rank in this timeline. A part is never
    negative: a rank that was itself slower than usual waits less, which counts as less bubble.

    Args:
        timeline: a whole minibatch, predicted or measured, with or without messages.

    Raises:
        ScheduleError: it lacks ops that others need.
    """
    usual = _usual_lengths(timeline)
    took = {span.op: span.end - span.start for span in timeline.spans if span.op.kind in BUSY}
    schedule = timeline.schedule
    # The three steps of the module's docstring; the third is the timeline itself.
    ideal = _makespan(schedule, usual, [0.0] * timeline.num_ranks)
    undelayed = _makespan(schedule, took, _begins(timeline))
    dust = _ROUNDING * timeline.makespan
    parts = []
    for ops, busy in zip(schedule.ranks, timeline.busy, strict=True):
        idle = max(timeline.makespan - busy, 0.0)
        # In this order, so that clocks that disagree leave no part below zero.
        without_messages = _at_most(undelayed - busy, idle, dust)
        forced = ideal - sum(map(usual.get, ops, repeat(0.0)))
        bubble = _at_most(forced, without_messages, dust)
        parts.append(Idle(bubble, without_messages - bubble, idle - without_messages))
    return tuple(parts)


def _at_most(part: float, whole: float, dust: float) -> float:
    """``part`` between 0 and ``whole``, and ``whole`` if only rounding makes it less."""
    return whole if part > whole - dust else max(part, 0.0)


def _begins(timeline: Timeline) -> list[float]:
    """When each rank began: with its first op, unless that may have had to wait for a peer."""
    schedule = timeline.schedule
    begins = []
    for rank, row in enumerate(timeline.rows):
        begin = row.starts[0] if row.ops else 0.0
        # A receive's span is its wait: it begins when the rank does.
        if row.ops and row.ops[0].kind not in COMMUNICATION:
            needed = schedule.dependencies(row.ops[0])
            waited = any(schedule.where.get(need, rank) != rank for need in needed)
            begin = 0.0 if waited else max(begin, 0.0)
        begins.append(begin)
    return begins


def _makespan(schedule: Schedule, lengths: Mapping[Op, float], begins: Sequence[float]) -> float:
    """How long the step would take if messages took no time."""
    needs = needs_of(schedule.columns)
    durations = np.array([lengths.get(op, 0.0) for ops in schedule.ranks for op in ops])
    at_once = {op: [(need, 0.0) for need in own] for op, own in needs.several.items()}
    no_delays = np.zeros(schedule.num_ops)
    times = go_through(schedule, needs, durations, no_delays, at_once, begins=begins)
    return max([*begins, *times.end.tolist()], default=0.0)


TOLERANCE = 0.02
"""Less than this share of the predicted step is no difference."""

_NOISES = 4.0


class Cause(NamedTuple):
    """Something that took another time than predicted.

    Attributes:
        kind: ``"op"``: the op itself; ``"pause"``: from the end of ``after`` until the op started;
            ``"begin"``: from the start of the step until the op started, the first of its rank.
        op: the op that took, or began at, another time.
        rank: where it ran.
        after: the op that it followed, where ``kind`` is ``"pause"``.
        after_rank: where that ran; another rank than ``rank`` if its result had to travel.
        predicted: how long it was to take.
        measured: how long it took.
    """

    kind: Literal["op", "pause", "begin"]
    op: Op
    rank: int
    after: Op | None
    after_rank: int
    predicted: float
    measured: float

    @property
    def excess(self) -> float:
        """How much longer the cause took than predicted; negative if it was quicker."""
        return self.measured - self.predicted


class Parting(NamedTuple):
    """The first op that did not run as predicted.

    Attributes:
        predicted: when it was to run.
        measured: when it ran.
        cause: the largest part of the difference.
    """

    predicted: Span
    measured: Span
    cause: Cause

    @property
    def start_excess(self) -> float:
        """How much later the op started than predicted; negative if it was early."""
        return self.measured.start - self.predicted.start


def find_parting(
    predicted: Timeline, measured: Timeline, tolerance: float = TOLERANCE
) -> Parting | None:
    """The first op, in measured time, that started or took otherwise than predicted.

    Args:
        predicted: the step as simulated, with or without messages.
        measured: the same step as recorded.
        tolerance: what does not count as a difference, as a share of the predicted makespan. What
            is within four times the usual scatter of op lengths does not count either.

    Returns:
        ``None`` if no op departs.

    Raises:
        InputError: the timelines do not show the same compute ops on the same ranks.
    """
    pair = _BothTimelines(predicted, measured)
    allowed = max(tolerance * predicted.makespan, _NOISES * _scatter(measured))
    for span in sorted(pair.measured.values(), key=lambda span: (span.start, span.rank)):
        before = pair.predicted[span.op]
        if abs(span.start - before.start) > allowed:
            return Parting(before, span, pair.cause_of_start(span.op))
        length = Cause("op", span.op, span.rank, None, span.rank, *pair.lengths(span.op))
        if abs(length.excess) > allowed:
            return Parting(before, span, length)
    return None


def _scatter(timeline: Timeline) -> float:
    usual = _usual_lengths(timeline)
    busy = [span for span in timeline.spans if span.op.kind in BUSY]
    return median([abs(span.end - span.start - usual[span.op]) for span in busy] or [0.0])


class _BothTimelines:
    """The work that both timelines show."""

    def __init__(self, predicted: Timeline, measured: Timeline) -> None:
        ours, theirs = _work(predicted), _work(measured)
        for shown, other, where in ((ours, theirs, "measured"), (theirs, ours, "predicted")):
            for op, span in shown.items():
                there = other.get(op)
                if op.kind in COMPUTE and (there is None or there.rank != span.rank):
                    raise InputError(
                        f"{op} of rank {span.rank} is not in the {where} timeline; compare "
                        "timelines of one schedule"
                    )
        self.predicted = {op: span for op, span in ours.items() if op in theirs}
        self.measured = {op: span for op, span in theirs.items() if op in ours}
        rows = [[s.op for s in row if s.op in self.measured] for row in measured.by_rank]
        self._schedule = Schedule.of(rows)
        self._previous = {op: before for row in rows for before, op in pairwise(row)}

    def lengths(self, op: Op) -> tuple[float, float]:
        """How long an op was to take, and took."""
        shown = self.predicted[op], self.measured[op]
        return shown[0].end - shown[0].start, shown[1].end - shown[1].start

    def cause_of_start(self, op: Op) -> Cause:
        """The largest part of an op's delay, or of what it was early."""
        late = self.measured[op].start > self.predicted[op].start
        # Who is late was held up in the measured timeline; who is early would have been in the
        # predicted one.
        parts = list(self._way_back(op, self.measured if late else self.predicted))
        sign = 1 if late else -1
        # Of equal parts the earliest one, which stands last.
        return max(reversed(parts), key=lambda part: sign * part.excess)

    def _way_back(self, op: Op, shown: Mapping[Op, Span]) -> Iterator[Cause]:
        """The parts of the time until ``op`` started, from the last to the first."""
        while True:
            start = self.predicted[op].start, self.measured[op].start
            rank = shown[op].rank
            before = self._followed(op, shown)
            if before is None:
                yield Cause("begin", op, rank, None, rank, *start)
                return
            ends = self.predicted[before].end, self.measured[before].end
            there = shown[before].rank
            yield Cause("pause", op, rank, before, there, start[0] - ends[0], start[1] - ends[1])
            yield Cause("op", before, there, None, there, *self.lengths(before))
            op = before

    def _followed(self, op: Op, shown: Mapping[Op, Span]) -> Op | None:
        """The op that ``op`` directly followed."""
        span, local = shown[op], self._previous.get(op)
        needed = [need for need in self._schedule.dependencies(op) if need in shown]
        remote = [need for need in needed if shown[need].rank != span.rank]
        last = max(remote, key=lambda need: shown[need].end, default=None)
        if last is None or local is None:
            return last or local
        # An idle rank waited for the result, if that could have been under way for so long.
        idle, spare = span.start - shown[local].end, shown[local].end - shown[last].end
        return last if idle > spare else local


def _work(timeline: Timeline) -> dict[Op, Span]:
    return {span.op: span for span in timeline.spans if span.op.kind in BUSY}


STRAGGLES = 1.1
"""A rank straggles that takes so many times as long as the usual one."""


class RankShare(NamedTuple):
    """A rank in a step.

    Attributes:
        rank: its number.
        busy: how long it worked.
        idle: how long it did not, while any rank did.
        predicted: how long it was predicted to work; ``None`` where nothing was.
        pace: its work over what was predicted, or over the usual rank's, both relative to the
            median of the ranks; 1 is usual.
    """

    rank: int
    busy: float
    idle: float
    predicted: float | None
    pace: float

    @property
    def straggles(self) -> bool:
        """Whether it takes longer than the others do."""
        return self.pace >= STRAGGLES


def rank_shares(measured: Timeline, predicted: Timeline | None = None) -> tuple[RankShare, ...]:
    """How the ranks did.

    Args:
        measured: of a step.
        predicted: of the same plan's. With it, a rank straggles if it is slower than predicted
            more than the others are; without, if it works longer than they do.

    Raises:
        InputError: the two have other ranks, or other stages on them.
    """
    if predicted is not None and measured.stages_of != predicted.stages_of:
        raise InputError(
            f"the measured timeline has stages {measured.stages_of} on its ranks, the predicted "
            f"one {predicted.stages_of}; compare a run with the plan that it ran"
        )
    expected = predicted.busy if predicted else (1.0,) * measured.num_ranks
    paces = [
        busy / usual if usual else 1.0 for busy, usual in zip(measured.busy, expected, strict=True)
    ]
    middle = median(paces) if paces else 1.0
    return tuple(
        RankShare(
            rank,
            busy,
            measured.makespan - busy,
            expected[rank] if predicted else None,
            pace / middle if middle else 1.0,
        )
        for rank, (busy, pace) in enumerate(zip(measured.busy, paces, strict=True))
    )
