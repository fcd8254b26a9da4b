"""How long a minibatch takes where the pipeline never drains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, lcm

from penstock.schedule import Schedule
from penstock.schedule.lower import add_updates
from penstock.schedule.rounds import Rounds
from penstock.timing.costs import Costs
from penstock.timing.simulator import simulate
from penstock.versions import Policy, rounds_of

Build = Callable[[int], Schedule]
"""The schedule of a stream of so many microbatches, compute only."""


def stream_of(
    build: Build,
    versions: Policy,
    num_minibatches: int,
    num_microbatches: int,
    replicas: Sequence[int],
) -> tuple[Schedule, Rounds]:
    """The schedule of ``num_minibatches`` without a flush, with their updates, and its rounds."""
    schedule = build(max(num_minibatches * num_microbatches, *replicas))
    rounds = rounds_of(versions, schedule, num_microbatches)
    return add_updates(schedule, rounds), rounds


def few_minibatches(replicas: Sequence[int], num_microbatches: int) -> int:
    """How many minibatches fill the pipeline and take every replica through whole turns."""
    period = lcm(num_microbatches, *replicas) // num_microbatches
    fills = 1 + 2 * sum(replicas) / num_microbatches
    whole_turns = ceil(fills / period) * period
    return min(whole_turns, 1 + ceil(2 * sum(replicas) * max(replicas) / num_microbatches))


def steady_seconds(
    build: Build, versions: Policy, costs: Costs, num_microbatches: int, replicas: Sequence[int]
) -> float:
    """Seconds of one minibatch when the pipeline is full: what a stream twice as long takes
    longer, per minibatch."""
    few = few_minibatches(replicas, num_microbatches)
    streams = (
        stream_of(build, versions, count, num_microbatches, replicas)[0] for count in (few, 2 * few)
    )
    first, second = (simulate(stream, costs).makespan for stream in streams)
    return (second - first) / few
