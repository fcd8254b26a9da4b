"""``Task``: a model, a cluster and a minibatch, where it may be cut, and how fast stages are."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from penstock.base.kept import kept
from penstock.core.cluster import Cluster, Link, Topology
from penstock.core.graph import LayerGraph, Mode
from penstock.core.schedule import Schedule
from penstock.planning.handover.capabilities import CutsBetween
from penstock.planning.handover.modules import places_inside
from penstock.planning.partition.chain import CostModel, Floats, cost_model, least_slowest
from penstock.planning.partition.layers import places_near, spread_places
from penstock.planning.planner.groups import TensorGroups
from penstock.planning.planner.layer_sums import LayerSums
from penstock.planning.planner.task_devices import TaskDevices, slowest_of
from penstock.planning.plans.stage_plan import Split
from penstock.planning.plans.summing import GatheredFor, ReducerName

_MOST_PLACES = 256
_MOST_KEPT_OPS = 4_000_000
"""Of schedules that were built; with all that follows from it, one takes 50 bytes."""


class Pace(NamedTuple):
    """Factors on the profile's seconds: of forwards and backwards, and of updates."""

    passes: float
    updates: float


@dataclass(frozen=True)
class Cache:
    """Results of others about a task, by what they depend on.

    Attributes:
        cuts: the best ones of settings without limits.
        offers: what was made of offers: candidates, or why there are none.
        shapes: replicas of each stage and devices of each rank that other planners would choose, in
            one entry when it is known; memory makes no difference.
        held: bytes of a rank, by all that they depend on.
        excess: bytes by which any candidate misses a limit, in one entry when that is known.
        exchanges: how long copies exchange, by all that this depends on.
    """

    cuts: dict[object, list[tuple[int, ...]]] = field(default_factory=dict)
    offers: dict[object, Any] = field(default_factory=dict)
    shapes: list[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]] = field(default_factory=list)
    held: dict[object, int] = field(default_factory=dict)
    excess: list[float] = field(default_factory=list)
    exchanges: dict[object, Any] = field(default_factory=dict)


class KeptSchedules(dict[Hashable, Schedule]):
    """Schedules that were built without costs, by all that they depend on; no more of the oldest
    than memory has room for."""

    def keep(self, key: Hashable, schedule: Schedule) -> None:
        """Keep one more."""
        self[key] = schedule
        while len(self) > 1 and sum(kept.num_ops for kept in self.values()) > _MOST_KEPT_OPS:
            del self[next(iter(self))]


@dataclass(frozen=True)
class Task:
    """A model, a cluster and a minibatch, for which a plan is to be made.

    Attributes:
        graph: the profile, with microbatches of one size.
        cluster: the devices.
        num_microbatches: how many a minibatch has.
        memory_bytes: what a device may use, on top of the cluster's own limits.
        communication: how gradients and outputs are counted.
        marks: numbers of layers with which stages must be able to begin.
        near: cuts; where not every layer can be a place to cut, those around these are.
        groups: where each device stands for several that share layers: which, and how.
        reducer: how copies of a stage sum gradients.
        stale: by how many updates the gradients of a copy may be late.
        gathered_for: how long fully sharded weights stay gathered.
        hybrid: whether they are sharded inside hosts only.
        cuts_between: which parts of the model, where another engine is to run it.
        expert_ranks: how many copies of a stage divide its experts; the graph says what that costs.
        undivided: the task in which each device has whole layers, and each copy all experts, where
            that is another one.
        schedules: those that were built for this task, or for others that were made of the same.
    """

    graph: LayerGraph
    cluster: Cluster
    num_microbatches: int
    memory_bytes: int | None = None
    communication: CostModel = field(default_factory=lambda: cost_model("ring", overlap=0.0))
    marks: tuple[int, ...] = ()
    near: tuple[int, ...] = ()
    groups: TensorGroups | None = None
    reducer: ReducerName = "owners"
    stale: int = 0
    gathered_for: GatheredFor = "step"
    hybrid: bool = False
    cuts_between: CutsBetween = "layers"
    expert_ranks: int = 1
    undivided: Task | None = None
    schedules: KeptSchedules = field(default_factory=KeptSchedules, compare=False, repr=False)

    @property
    def alone(self) -> Task:
        """The task in which no device has a part of a layer."""
        return self.undivided or self

    @property
    def num_tensor_ranks(self) -> int:
        """The most devices that share layers."""
        return 1 if self.groups is None else self.groups.num_ranks

    @cached_property
    def topology(self) -> Topology:
        """How the devices are joined."""
        return Topology(self.cluster)

    @cached_property
    def devices(self) -> TaskDevices:
        """The devices, as sets of them are asked about."""
        return TaskDevices(self.topology, self.groups, self.memory_bytes)

    @cached_property
    def layers(self) -> LayerSums:
        """The numbers of layers that make a stage."""
        return LayerSums(self.graph, self.places)

    @cached_property
    def cache(self) -> Cache:
        """Results of others about this task."""
        return Cache()

    @cached_property
    def num_layers(self) -> int:
        """How many layers the model has."""
        return len(self.graph.layers)

    @kept
    def least_slowest(self, num_stages: int) -> float:
        """Forward and backward of a microbatch on the slowest of so many stages, at least, on
        devices of the profile's speed."""
        seconds = self.layers.compute_seconds
        if self.is_coarse or num_stages > self.num_layers:
            return max(sum(seconds) / num_stages, *seconds)
        return least_slowest(seconds, num_stages)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Where the exact search may cut, the two ends of the model included: everywhere in a model
        of up to ``_MOST_PLACES`` layers; in a longer one around ``near``, or else in as many places
        between which compute and memory are alike. Any other cut can be asked for and moved to."""
        count, most = self.num_layers, self._most_places
        if count <= most:
            return tuple(place for place in range(count + 1) if place not in self.inside)
        chosen = (
            places_near(self.near, count, most) if self.near else spread_places(self.graph, most)
        )
        return tuple(sorted({0, count, *self.marks} | (chosen - self.inside)))

    @cached_property
    def inside(self) -> frozenset[int]:
        """The layers with which no stage may begin, but those that were asked for."""
        names = [layer.name for layer in self.graph.layers]
        return places_inside(names, self.cuts_between) - {*self.marks}

    @property
    def is_coarse(self) -> bool:
        """Whether there are layers between which the exact search does not cut."""
        return self.num_layers > self._most_places

    @property
    def _most_places(self) -> int:
        # As many stages as devices must be possible, with some choice.
        return max(_MOST_PLACES, 2 * len(self.cluster.devices))

    @kept
    def splits(self, start: int, stop: int) -> dict[str, Split]:
        """How a group shares the layers ``[start, stop)``, as a plan says it; nothing is shared
        where devices stand for themselves."""
        names = [layer.name for layer in self.graph.layers[start:stop]]
        return {} if self.groups is None else self.groups.splits(names)

    def pace(self, devices: tuple[int, ...], used: Collection[int], mode: Mode) -> Pace:
        """The factors on the profile's seconds on the slowest of a stage's devices.

        Args:
            used: by the whole plan.
        """
        slowest = self.devices.slowest_speed(devices)
        if not self.devices.are_crowded(devices, used):
            return Pace(1 / slowest, 1 / slowest)
        contention = self.graph.contention
        return Pace(contention.of_passes(mode) / slowest, contention.of_updates(mode) / slowest)

    @kept
    def least_busy(
        self, devices: tuple[int, ...], modes: tuple[Mode, ...], num_pipelines: int
    ) -> tuple[float, float]:
        """(seconds that a minibatch takes at least, however its stages are cut, with all of these
        devices busy all the time; the least factor on the seconds of passes on any of them).

        Args:
            modes: in one of which ranks work.
            num_pipelines: side by side, each with microbatches of its own.
        """
        paces = [self.least_paces(devices, mode) for mode in modes]
        turns = (
            len(range(own, self.num_microbatches, num_pipelines))
            / max(sum(1 / pace for pace in of_mode[own::num_pipelines]) for of_mode in paces)
            for own in range(num_pipelines)
        )
        return max(turns) * sum(self.layers.compute_seconds), min(map(min, paces))

    def least_paces(self, used: Sequence[int], mode: Mode) -> list[float]:
        """The least factor on the seconds of passes at any stage that has each device of those that
        are used."""
        # Who works beside one that shares its host counts as if it did, too.
        crowded = self.graph.contention.of_passes(mode)
        if not self.topology.shared_memories:
            least = min(1.0, crowded)
            return [least / self.cluster.devices[device].speed for device in used]
        return [
            min(
                self.pace((device,), used, mode).passes,
                crowded / self.cluster.devices[device].speed,
            )
            for device in used
        ]

    def hops(self, sources: tuple[int, ...], targets: tuple[int, ...], *, in_turns: bool) -> Floats:
        """Seconds from a stage to the next if it ends at each place; one array for all stages that
        are joined alike."""
        return self._hops_over(self.devices.links_between(sources, targets, in_turns))

    @kept
    def _hops_over(self, links: tuple[Link, ...]) -> Floats:
        inside = range(1, self.num_layers)
        return np.array(
            [self._hop_over(links, stop)[0] if stop in inside else 0.0 for stop in self.places]
        )

    def hop(
        self, stop: int, sources: Sequence[int], targets: Sequence[int], *, in_turns: bool = False
    ) -> tuple[float, float]:
        """(seconds until the output of the layers before ``stop`` can be used by others, how long
        that keeps the link busy); see ``TaskDevices.links_between``."""
        links = self.devices.links_between(tuple(sources), tuple(targets), in_turns)
        return self._hop_over(links, stop)

    def _hop_over(self, links: tuple[Link, ...], stop: int) -> tuple[float, float]:
        num_bytes = self.layers.crossing_bytes[stop]
        link = slowest_of(links, num_bytes)
        seconds, busy = link.seconds(num_bytes), link.seconds(num_bytes) - link.latency_seconds
        # A link with a latency was measured as a whole; one without does not know what handing a
        # message to another worker costs, but the profile does.
        return (seconds if link.latency_seconds else seconds + self.graph.hop_seconds), busy
