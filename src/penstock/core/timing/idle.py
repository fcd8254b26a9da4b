"""Where the idle time of each rank comes from: the schedule, slow peers, or messages.

A gap in a timeline has no single cause. A rank may wait for a message that left late because its
sender waited for a slow op elsewhere, and a message that is late may cost nothing, because its
receiver would have had to wait for something else anyway. So the step is thought through again, in
the same order of ops, with one cause left out after the other. A rank's idle time is the length of
the step without its own work; three steps are compared:

1. every op takes its usual time, messages take none, all ranks begin at once;
2. every op takes the time it really took, every rank begins when it really began, messages and
   whatever else passes between two ops take no time;
3. the step as it is.

The idle time of the first is *bubble*: the order of the schedule forces it, in warm-up, cool-down
and between stages of different lengths. What the second adds is *waiting* for a peer that was
slower than usual or began late. What the third adds is *communication*: from the end of an op until
its result is usable elsewhere, sending and unpacking included, as far as compute does not hide it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

from penstock.core.schedule.columns.needs import needs_of
from penstock.core.schedule.op import COMMUNICATION, Op
from penstock.core.schedule.schedule import Schedule
from penstock.core.timing.measured import usual_lengths
from penstock.core.timing.simulator.passage import go_through
from penstock.core.timing.spans import BUSY
from penstock.core.timing.timeline import Timeline

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
    usual = usual_lengths(timeline)
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
        first = row.ops[0] if row.ops else None
        waited = first is not None and any(
            schedule.where.get(needed, rank) != rank for needed in schedule.dependencies(first)
        )
        # A receive's span is its wait: it begins when the rank does.
        known = first is not None and (first.kind in COMMUNICATION or not waited)
        begins.append(row.starts[0] if known else 0.0)
    return begins


def _makespan(schedule: Schedule, lengths: Mapping[Op, float], begins: Sequence[float]) -> float:
    """How long the step would take if messages took no time."""
    needs = needs_of(schedule.columns)
    durations = np.array([lengths.get(op, 0.0) for ops in schedule.ranks for op in ops])
    at_once = {op: [(need, 0.0) for need in own] for op, own in needs.several.items()}
    no_delays = np.zeros(schedule.num_ops)
    _, end = go_through(schedule, needs, durations, no_delays, at_once, begins=begins)
    return max([*begins, *end.tolist()], default=0.0)
