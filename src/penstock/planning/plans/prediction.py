"""``Prediction``: what the stages of a plan, or of a candidate for one, are predicted to do; and
how long a minibatch takes where the pipeline never drains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf, lcm
from typing import NamedTuple

from penstock.core.schedule import Schedule
from penstock.core.schedule.lower import add_update, add_updates
from penstock.core.schedule.repetition import repetitions_of, shortened, with_turns
from penstock.core.schedule.rounds import Rounds, filling
from penstock.core.timing.costs import Costs
from penstock.core.timing.simulator import rows_of, simulate
from penstock.core.timing.simulator.beside import Served
from penstock.core.timing.simulator.rhythm import step_in_rhythm
from penstock.core.timing.simulator.step import (
    StepTimes,
    microbatches_of_two,
    step_in_rows,
    step_of,
    two_pipelines,
)
from penstock.core.timing.spans import slowest_beat
from penstock.core.timing.timeline import Timeline
from penstock.core.versions import Policy, place_of, rounds_of, versions_read
from penstock.planning.plans.memory_parts import MemoryParts, allocated, parts_of_ranks
from penstock.planning.plans.spilling import (
    Offload,
    Spill,
    bytes_of_spilled_ranks,
    offloading_costs,
    spilled_costs,
    with_residence,
)
from penstock.planning.plans.stage_plan import StagePlan, bytes_of_ranks, costs_of

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


def _stream_length(policy: Policy, num_microbatches: int, replicas: Sequence[int]) -> int:
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
    length, seconds = _stream_length(versions, size, replicas), 0.0
    for times_longer in _TIMES_LONGER:
        stream, _ = stream_of(build, versions, times_longer * length, size, replicas)
        seconds, regular = slowest_beat(rows_of(stream, costs))
        if regular:
            break
    return num_microbatches * seconds


def num_simulated(versions: Policy, num_microbatches: int, replicas: Sequence[int]) -> int:
    """How many microbatches ``steady_seconds`` looks at."""
    size = _shown_size(versions, num_microbatches)
    return size * _stream_length(versions, size, replicas)


def _shown_size(versions: Policy, num_microbatches: int) -> int:
    """Microbatches of a minibatch, or fewer where stages update after each of them: there it makes
    no difference how long a minibatch is."""
    if versions.updates == "minibatch":
        return num_microbatches
    return min(num_microbatches, _ENOUGH)


_SHOWN_TICKS = 8
"""Of a live stream's steady state, in pictures."""

_FILLINGS = 8
"""So many times the stages are microbatches that show a middle, with a beginning and an end."""


class Latency(NamedTuple):
    """How long a frame takes from the first stage to its output.

    Attributes:
        light: where frames come seldom: all forwards and hops, one after another.
        saturated: where frames come as fast as they are taken, or faster: as many ticks as there
            are stages, if as many frames are let in. Frames that wait in front of the first stage
            are not in it.
    """

    light: float
    saturated: float


@dataclass(frozen=True)
class Prediction:
    """Everything that follows from stages and the order of their ops. Each part is worked out when
    it is first asked for, once.

    Attributes:
        stages: in execution order.
        num_microbatches: per minibatch.
        versions: which weights passes read.
        replicas: how many ranks hold each stage.
        placement: a schedule in which every rank has something to do: of one minibatch where the
            pipeline drains, of a stream as long as fills it where it never does. Of pipelines side
            by side it may have two alone (``two_pipelines``), and it is abridged where there are
            very many microbatches.
        build: makes the schedule of another number of microbatches.
        spill: where stages are while they are not in memory, if they leave it.
        offload: where activations are meanwhile, if any leave; the placement says which.
        served: which stages hand their gradients to servers.
        cards, hosts: of each rank, as ``Costs`` has them.
        slacks: of each rank's device, ``Device.allocator_slack``; empty where there is none.
    """

    stages: tuple[StagePlan, ...]
    num_microbatches: int
    versions: Policy
    replicas: tuple[int, ...]
    placement: Schedule
    build: Callable[[int], Schedule]
    spill: Spill | None = None
    offload: Offload | None = None
    served: Served = field(default_factory=Served)
    cards: tuple[int, ...] = ()
    hosts: tuple[int, ...] = ()
    slacks: tuple[float, ...] = ()

    @property
    def flushes(self) -> bool:
        """Whether the pipeline drains at the end of each minibatch."""
        return not self.versions.asynchronous

    @property
    def left_out(self) -> int:
        """How many microbatches of a minibatch the placement leaves out of its middle."""
        count, width = self.num_microbatches, max(self.replicas)
        if max(self.placement.copies.values()) < width:  # it has the first and the last alone
            count = microbatches_of_two(count, width)
        return max(count - self.placement.num_microbatches, 0) if self.flushes else 0

    @cached_property
    def costs(self) -> Costs:
        """The duration of each op, stage by stage."""
        costs = replace(costs_of(self.stages), cards=self.cards, hosts=self.hosts)
        if self.offload is not None:
            costs = offloading_costs(costs, self.stages, self.offload)
        if self.spill is None:
            return costs
        return spilled_costs(costs, self.stages, self.spill, self.placement)

    @cached_property
    def timeline(self) -> Timeline:
        """One step with its update; where the pipeline never drains, the beginning and end of a
        stream that is long enough to show the steady state."""
        if self.spill is not None:
            return simulate(with_residence(self.placement, self.spill), self.costs)
        if self.flushes:
            whole = self.build(self.num_microbatches) if self.left_out else self.placement
            return self.served.shown_in(simulate(add_update(whole), self.costs))
        if self.is_live:
            return self.stream_of(_SHOWN_TICKS + 4 * len(self.stages))
        return self.stream_behind(3 * self.placement.num_ranks)

    def stream(self, num_minibatches: int) -> Timeline:
        """A stream of minibatches without a flush, from its beginning to its end, with the versions
        that passes read; of a live stream, with frames that come as fast as they are taken. It is
        not kept, since it may be long."""
        return self._stream(num_minibatches, self.num_microbatches)

    def stream_of(self, num_microbatches: int) -> Timeline:
        """As ``stream``, of at least so many microbatches; where minibatches have thousands, and
        each microbatch is an update, of a thousand."""
        size = self.shown_size
        return self._stream(ceil(num_microbatches / size), size)

    def stream_behind(self, num_microbatches: int) -> Timeline:
        """As ``stream_of``, with one more minibatch."""
        return self.stream_of(num_microbatches + self.shown_size)

    @property
    def shown_size(self) -> int:
        """Microbatches of a minibatch, or as many as show what all of them do."""
        return _shown_size(self.versions, self.num_microbatches)

    def _stream(self, num_minibatches: int, size: int) -> Timeline:
        build, versions = self.build, self.versions
        stream, rounds = stream_of(build, versions, num_minibatches, size, self.replicas)
        read = versions_read(stream, self.versions, rounds)
        paced = self.is_live and self.step_seconds
        arrivals = self.frames_per_second if paced else None
        timeline = simulate(stream, self.costs, arrivals=arrivals).with_versions(read)
        return self.served.shown_in(timeline)

    @property
    def num_shown(self) -> int:
        """How many ticks of a live stream are to be seen; 0 of all else, which is seen whole."""
        return _SHOWN_TICKS if self.is_live else 0

    @property
    def shown(self) -> Timeline:
        """The part of ``timeline`` that is shown: of a live stream a few ticks in the middle, since
        its beginning and its end are not what it looks like while it goes on; of very many
        microbatches, as many in the middle as there are ranks."""
        if self.left_out:
            return self._middle
        return self.timeline.steady(self.num_shown) if self.is_live else self.timeline

    @property
    def ends(self) -> Timeline:
        """As ``timeline``, but of very many microbatches without most of the middle, or where ranks
        do not come into a rhythm, some of the middle."""
        if not self.left_out:
            return self.timeline
        from penstock.core.timing.abridged import abridged_timeline
        from penstock.drawing.timeline.excerpt import OPS_PER_RANK

        abridged = abridged_timeline(self.placement, self.costs, self.left_out, OPS_PER_RANK)
        return self._middle if abridged is None else self.served.shown_in(abridged)

    @property
    def _middle(self) -> Timeline:
        from penstock.drawing.timeline.excerpt import steady_part  # a plan that runs is not drawn

        turns = repetitions_of(self.placement.columns)
        fills = ceil(_FILLINGS * len(self.stages) / turns[0].microbatches)
        longer = with_turns(self.placement, turns, fills)
        shown = max(turns[0].microbatches, self.placement.num_ranks)
        return steady_part(simulate(add_update(longer), self.costs), shown)

    @cached_property
    def step_seconds(self) -> float:
        """Seconds of a minibatch with its update; without a flush, in the steady state."""
        if self.flushes:
            return self.timeline.makespan if self.step is None else self.step.seconds
        return steady_seconds(
            self.build, self.versions, self.costs, self.num_microbatches, self.replicas
        )

    @cached_property
    def step(self) -> StepTimes | None:
        """One step with its update, without its timeline; ``None`` where there is no shorter way
        to it than through that."""
        if self.spill is not None or self.offload is not None or not self.flushes:
            return None
        step = step_of(self.placement, self.costs, self.left_out)
        if step is not None:
            return step
        schedule, left_out = self.placement, self.left_out
        if not left_out:
            schedule, left_out = shortened(schedule)
        if left_out:
            in_rhythm = step_in_rhythm(schedule, self.costs, left_out, folds=True)
            step = None if in_rhythm is None else in_rhythm.step
        return self._step_of_two() if step is None and not self.left_out else step

    def _step_of_two(self) -> StepTimes | None:
        alone = two_pipelines(self.placement, self.costs)
        if alone is None:
            return None
        schedule = add_update(alone[0])
        return step_in_rows(schedule, rows_of(schedule, alone[1]))

    @property
    def frames_per_second(self) -> float:
        """Microbatches that go through per second; infinite where nothing takes any time."""
        return self.num_microbatches / self.step_seconds if self.step_seconds else inf

    @property
    def latency(self) -> Latency:
        """How long a frame of a stream takes from the first stage to its output."""
        hops = sum(stage.hop_seconds for stage in self.stages[:-1])
        way = sum(stage.forward_seconds for stage in self.stages) + hops
        ticks = len(self.stages) / self.frames_per_second
        return Latency(way, max(way, ticks))

    @property
    def is_live(self) -> bool:
        """Whether every frame of a stream trains the model as it comes."""
        return self.versions.activations == "newest"

    @property
    def bubble(self) -> float:
        """Idle rank-time over all rank-time of a minibatch, from 0 to 1."""
        if self.flushes and self.step is None:
            return self.timeline.bubble
        return self.bubble_of(self.step_seconds)

    def bubble_of(self, seconds: float) -> float:
        """The bubble of a minibatch that takes so long."""
        if not seconds:
            return 0.0
        return max(0.0, 1 - self.work_seconds / (seconds * self.num_ranks))

    @property
    def num_ranks(self) -> int:
        """How many ranks there are, also those that do what others do and are not placed."""
        placed = sum(self.placement.copies.values())
        return self.placement.num_ranks * sum(self.replicas) // placed

    @cached_property
    def work_seconds(self) -> float:
        """Seconds that all ranks together work for a minibatch, updates included."""
        compute = sum(stage.busy_seconds for stage in self.stages)
        parts = zip(self.stages, self.updates_per_minibatch, self.replicas, strict=True)
        updates = sum(stage.update_seconds * count * ranks for stage, count, ranks in parts)
        return self.num_microbatches * compute + updates

    @property
    def updates_per_minibatch(self) -> tuple[float, ...]:
        """How often each rank of each stage updates its weights."""
        if self.versions.updates == "minibatch":
            return (1.0,) * len(self.stages)
        return tuple(self.num_microbatches / count for count in self.replicas)

    @cached_property
    def rank_bytes(self) -> tuple[int, ...]:
        """Bytes of memory that each rank needs at its worst moment."""
        return allocated(self._tensor_bytes, self.slacks)

    @cached_property
    def _tensor_bytes(self) -> tuple[int, ...]:
        if self.spill is not None:
            return bytes_of_spilled_ranks(self.stages, self.placement, self.spill)
        return bytes_of_ranks(self.stages, self.placement)

    @cached_property
    def memory_parts(self) -> tuple[MemoryParts, ...]:
        """What the bytes of each rank are spent on; they add up to ``rank_bytes``."""
        parts = parts_of_ranks(self.stages, self.placement, self._tensor_bytes, self.spill)
        pairs = zip(parts, self.rank_bytes, strict=True)
        return tuple(own._replace(allocator=whole - own.total) for own, whole in pairs)

    @property
    def delay(self) -> float:
        """Updates between the weights that a gradient is computed with and those that it is applied
        to, at the stage where these are most."""
        places = (
            place_of(self.versions, self.replicas, stage, self.num_microbatches)
            for stage in range(len(self.stages))
        )
        return max(map(self.versions.delay, places))
