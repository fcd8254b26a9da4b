"""How long a minibatch takes where the pipeline never drains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, lcm

from penstock.core.schedule import Schedule
from penstock.core.schedule.lower import add_updates
from penstock.core.schedule.rounds import Rounds, filling
from penstock.core.timing.costs import Costs
from penstock.core.timing.simulator import simulate
from penstock.core.timing.spans import slowest_beat
from penstock.core.versions import Policy, rounds_of

Build = Callable[[int], Schedule]
"""The schedule of a stream of so many microbatches, compute only."""

_TIMES_LONGER = (1, 2)
"""Streams that are simulated until one has come to its beat: it takes long where two loops hold
the pipeline up alike."""

_ENOUGH = 1000
"""Microbatches that show the beat of a stream, for any number of stages that fill it."""


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


def stream_length(policy: Policy, num_microbatches: int, replicas: Sequence[int]) -> int:
    """How many minibatches show the steady state: their second half has several rounds of all that
    is in flight."""
    rounds = ceil(4 * filling(replicas, policy.ahead) / num_microbatches)
    return max(2 * _few_minibatches(replicas, num_microbatches), rounds)


def _few_minibatches(replicas: Sequence[int], num_microbatches: int) -> int:
    """How many minibatches fill the pipeline and take every replica through whole turns."""
    period = lcm(num_microbatches, *replicas) // num_microbatches
    fills = 1 + 2 * sum(replicas) / num_microbatches
    whole_turns = ceil(fills / period) * period
    return min(whole_turns, 1 + ceil(2 * sum(replicas) * max(replicas) / num_microbatches))


def steady_seconds(
    build: Build, versions: Policy, costs: Costs, num_microbatches: int, replicas: Sequence[int]
) -> float:
    """Seconds of one minibatch when the pipeline is full: as forwards follow each other, which no
    end of the stream changes."""
    size = _shown_size(versions, num_microbatches)
    length, seconds = stream_length(versions, size, replicas), 0.0
    for times_longer in _TIMES_LONGER:
        stream, _ = stream_of(build, versions, times_longer * length, size, replicas)
        seconds, regular = slowest_beat(simulate(stream, costs).rows)
        if regular:
            break
    return num_microbatches * seconds


def num_simulated(versions: Policy, num_microbatches: int, replicas: Sequence[int]) -> int:
    """How many microbatches ``steady_seconds`` looks at."""
    size = _shown_size(versions, num_microbatches)
    return size * stream_length(versions, size, replicas)


def _shown_size(versions: Policy, num_microbatches: int) -> int:
    """Microbatches of a minibatch, or fewer where stages update after each of them: there it makes
    no difference how long a minibatch is."""
    if versions.updates == "minibatch":
        return num_microbatches
    return min(num_microbatches, _ENOUGH)
