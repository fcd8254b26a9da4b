"""What ops and messages cost in a timeline, so that it can be simulated again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import median
from typing import NamedTuple

from penstock.core.schedule.channels import RECEIVES, SENDS
from penstock.core.schedule.op import Kind, Op
from penstock.core.schedule.schedule import Schedule
from penstock.core.timing.costs import Costs
from penstock.core.timing.spans import BUSY, Span
from penstock.core.timing.timeline import Timeline


def usual_lengths(timeline: Timeline) -> dict[Op, float]:
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
