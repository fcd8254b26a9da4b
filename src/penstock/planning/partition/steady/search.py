"""``best_partition``: the best partition of a model on a cluster under a cost model.

Where links and speeds differ, partitions whose stages take devices in the cluster's order are
searched with each link at its true speed. A stage may begin and end anywhere, also in the midst of
a server. What an exchange of gradients costs depends on which devices take
part, and what a cut costs on both of its stages, so a dynamic programme goes over (state, first
device, slowest link that the cut before may take), from the end of the model to its beginning.
Devices that are left over at the end count as busy where microbatches in flight are counted; that
is cautious, not exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import ceil, inf
from typing import Literal

import numpy as np

from penstock.base.errors import InputError, PlanError
from penstock.base.values import is_whole, one_of
from penstock.core.cluster import Cluster, Link, Topology
from penstock.core.graph import LayerGraph
from penstock.planning.partition.chain import ROUNDING, Array, CostModel, check_updates
from penstock.planning.partition.steady.evaluation import (
    Partition,
    PartitionedStage,
    evaluate,
    exchange_lines,
    usual_seconds,
)
from penstock.planning.partition.steady.flat import FlatTask, search_flat
from penstock.planning.partition.steady.levels import MOST_STEPS, levels_of, nested_partition, steps
from penstock.planning.partition.steady.states import (
    MOST_STATES,
    Fits,
    Piece,
    States,
    all_fit,
    all_states,
    prefixes,
)


@dataclass(frozen=True)
class _OrderTask:
    """The search for the best partition as in ``FlatTask``, with the cluster's tree in the place of
    the link."""

    states: States
    cost_model: CostModel
    topology: Topology
    num_devices: int
    updates: float = 1.0
    most_replicas: int = 1 << 30
    fits: Fits | None = None

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """Between neighbours in the order of devices, fastest first."""
        used = {self.topology.link(index, index + 1) for index in range(self.num_devices - 1)}
        return tuple(sorted(used, key=usual_seconds)) or (Link(),)

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """How fast each device is."""
        devices = self.topology.cluster.devices
        return tuple(device.speed for device in devices[: self.num_devices])

    @cached_property
    def cuts(self) -> Array:
        """Seconds ``[link, state]`` of a cut between single devices."""
        sizes = self.states.cut_bytes[1:-1]
        rows = [
            [self.cost_model.cut_seconds(size, 1, link) for size in sizes] for link in self.links
        ]
        return np.pad(np.array(rows).reshape(len(self.links), -1), ((0, 0), (1, 1)))

    def slowest(self, first: int, last: int) -> int:
        """The slowest link from one device to another, by its place in ``links``."""
        between = [
            self.links.index(self.topology.link(index, index + 1)) for index in range(first, last)
        ]
        return max(between, default=0)


@dataclass(frozen=True)
class _BestRest:
    """Arrays ``[link, state]``: how fast the rest can be, and how its first stage then is."""

    seconds: Array
    next_device: Array
    next_state: Array
    next_link: Array


@dataclass
class _OrderSearch:
    task: _OrderTask
    below: float
    table: dict[int, _BestRest] = field(default_factory=dict)

    def result(self) -> tuple[int, tuple[Piece, ...]] | None:
        end = self.task.num_devices
        self.table[end] = self._blank()
        first_device = None
        for device in range(end - 1, -1, -1):
            self.table[device] = self._from(device)
            seconds = float(self.table[device].seconds[-1, 0])
            if seconds < self.below * (1 - ROUNDING):
                self.below, first_device = seconds, device
        return None if first_device is None else (first_device, self._pieces(first_device))

    def _blank(self) -> _BestRest:
        shape = self.task.cuts.shape
        numbers = [np.zeros(shape, dtype=np.int32) for _ in range(3)]
        blank = _BestRest(np.full(shape, inf), *numbers)
        blank.seconds[:, -1] = 0.0  # the model may end before the devices do
        return blank

    def _pieces(self, device: int) -> tuple[Piece, ...]:
        pieces, state, link = [], 0, len(self.task.links) - 1
        while state < len(self.task.states.sets) - 1:
            here = self.table[device]
            stop, behind = int(here.next_state[link, state]), int(here.next_device[link, state])
            pieces.append(Piece(state, stop, behind - device))
            state, device, link = stop, behind, int(here.next_link[link, state])
        return tuple(pieces)

    def _from(self, device: int) -> _BestRest:
        """The best that begins on a device, for every state and every slowest link before it."""
        made = self._blank()
        rows = self._reachable(device)
        last = min(self.task.num_devices, device + self.task.most_replicas)
        for behind in range(device + 1, last + 1):
            self._try(made, rows, device, behind)
        return made

    def _reachable(self, device: int) -> Array:
        """States that a partition faster than ``below`` may have before a device."""
        seconds, speeds = self.task.states.compute_seconds, self.task.speeds
        before, after = sum(speeds[:device]), sum(speeds[device:])
        early = seconds <= self.below * before * (1 + 1e-9)
        late = seconds[-1] - seconds <= self.below * after * (1 + 1e-9)
        return np.flatnonzero(early & late)

    def _try(self, made: _BestRest, rows: Array, device: int, behind: int) -> None:
        """Stages on the devices from ``device`` up to ``behind``."""
        task, count = self.task, behind - device
        own = task.slowest(device, behind - 1)
        shared = count if task.cost_model.shares_cuts else 1
        # The link of the cut is no faster than any among the stage's devices and to the next one.
        to_next = max(own, task.slowest(behind - 1, min(behind, task.num_devices - 1)))
        rest = np.maximum(self.table[behind].seconds[to_next:], task.cuts[to_next:] / shared)
        link = rest.argmin(axis=0)
        rest = rest[link, np.arange(rest.shape[1])]
        columns = np.flatnonzero(rest < self.below)
        if not len(rows) or not len(columns):
            return
        beats = np.maximum(self._stages(rows, columns, device, behind), rest[columns])
        if task.fits is not None:
            self._forbid(beats, rows, columns, count, task.num_devices - behind)
        best = beats.argmin(axis=1)
        least = beats[np.arange(len(rows)), best]
        for before in range(own, len(task.links)):
            seconds = np.maximum(least, task.cuts[before, rows] / shared)
            better = seconds < np.minimum(made.seconds[before, rows], self.below)
            state, stop = rows[better], columns[best[better]]
            made.seconds[before, state] = seconds[better]
            made.next_device[before, state] = behind
            made.next_state[before, state] = stop
            made.next_link[before, state] = link[stop] + to_next

    def _stages(self, rows: Array, columns: Array, device: int, behind: int) -> Array:
        """Seconds of stages between states ``[row, column]``; infinite where there is none."""
        task, states = self.task, self.task.states
        pace = min(task.speeds[device:behind])
        compute = states.compute_seconds[columns][None] - states.compute_seconds[rows][:, None]
        compute = compute / pace / (behind - device)
        sizes = states.gradient_bytes[columns][None] - states.gradient_bytes[rows][:, None]
        lines = exchange_lines(task.cost_model, task.topology, range(device, behind))
        exchange = np.min([slope * sizes + base for slope, base in lines], axis=0)
        exchange = exchange * min(task.updates, 1 / (behind - device))
        beats = task.cost_model.together(compute, exchange)
        return np.where(states.nested[np.ix_(rows, columns)], beats, inf)

    def _forbid(self, beats: Array, rows: Array, columns: Array, count: int, behind: int) -> None:
        """Make infinite what does not fit."""
        in_flight = 1 + ceil(behind / count)
        for row, column in np.argwhere(beats < self.below):
            if not self._fits(int(rows[row]), int(columns[column]), count, in_flight):
                beats[row, column] = inf

    @cached_property
    def _fits(self) -> Callable[[int, int, int, int], bool]:
        fits = self.task.fits
        assert fits is not None

        @cache
        def asked(start: int, stop: int, count: int, in_flight: int) -> bool:
            return fits(self.task.states.between(start, stop), count, in_flight)

        return asked


_MOST_DEVICES = 64
"""Where links differ, all ranges of more devices are too many to try."""

LayerOrder = Literal["execution", "any"]


def best_partition(
    graph: LayerGraph,
    cluster: Cluster,
    cost_model: CostModel,
    *,
    updates: float = 1.0,
    straight: bool = False,
    order: LayerOrder = "execution",
    fits: Fits | None = None,
    num_devices: int | None = None,
) -> Partition:
    """Stages, replicas and devices with the least steady-state seconds per microbatch.

    Exact on clusters with one link and one speed: over all cuts of the execution order, or with
    ``order="any"`` over all cuts of the graph, all counts of replicas, and all that ``fits``. On
    others it is the best of those that take devices in the cluster's order, so that a stage is
    on neighbours and may cross servers, scored with the links that they use; speeds may be mixed.
    Up to 64 devices, or any number for straight pipelines: beyond that, every link counts as the
    slowest. On regular trees what PipeDream's programme finds level by level
    (``steady.levels``) competes too, scored in the same way, where all devices may be used and
    the programme does not take seconds. ``method`` of the result says what was searched.

    Devices may be left over. Parameters that several layers share count in each.

    Args:
        cost_model: what stages and cuts cost.
        updates: per microbatch, as in ``CostModel.shared_seconds``; 1/m for synchronous training
            with m microbatches.
        straight: whether every stage has one device.
        order: ``"any"`` also cuts where no prefix of the execution order ends. A graph with more
            than ``states.MOST_STATES`` places to cut is cut in execution order even so; ``method``
            of the result says it.
        fits: may a stage have these layers (by index), so many replicas, and so many microbatches
            in flight on each of them? These are 1 + ⌈devices behind it / its replicas⌉, as in
            PipeDream; for straight pipelines, the number of stages from it to the end. What fits
            with some microbatches in flight must fit with fewer.
        num_devices: use at most so many, the first in the cluster; all by default.

    Raises:
        InputError: an argument has no meaning.
        PlanError: nothing fits.
    """
    count = _check(cluster, updates, order, num_devices)
    topology = Topology(cluster)
    link = topology.slowest_link(range(count))
    speeds = [device.speed for device in cluster.devices[:count]]
    states = all_states(graph, limited=fits is not None) if order == "any" else None
    method = "all cuts of the graph" if states else "cuts of the execution order"
    if order == "any" and not states:
        method += f", since the graph has more than {MOST_STATES} places to cut"
    task = FlatTask(
        states=states or prefixes(graph),
        cost_model=cost_model,
        link=link,
        num_devices=count,
        updates=updates,
        most_replicas=1 if straight else count,
        speed=min(speeds),
        fits=fits,
    )
    flat = search_flat(task)
    if flat is None:
        raise PlanError(
            f"no partition on {count} devices fits: a stage breaks its limit however layers are "
            "cut; raise the limits, use more devices or recompute"
        )
    best = _partition(task, cluster, 0, flat.pieces, method)
    if _is_uniform(topology, count):
        return best
    best = _with_true_links(task, topology, best)
    nested = _level_by_level(task, cluster)
    return min((best, *nested), key=lambda made: made.bottleneck_seconds)


def _level_by_level(task: FlatTask, cluster: Cluster) -> list[Partition]:
    """The answer of PipeDream's programme, if it has something to say here and that fits."""
    levels = levels_of(cluster)
    if levels is None or task.most_replicas == 1 or task.num_devices < len(cluster.devices):
        return []
    graph = task.states.graph
    if steps(len(graph.layers) + 1, levels.counts, task.updates) > MOST_STEPS:
        return []
    made = nested_partition(graph, cluster, task.cost_model, updates=task.updates).partition
    place = {layer.name: index for index, layer in enumerate(graph.layers)}
    stages = [([place[name] for name in stage.layers], stage.replicas) for stage in made.stages]
    return [made] if task.fits is None or all_fit(task.fits, stages) else []


def _with_true_links(task: FlatTask, topology: Topology, best: Partition) -> Partition:
    """The best partition on a cluster with several links or speeds, given one that has none."""
    if task.num_devices > _MOST_DEVICES and task.most_replicas > 1:
        return replace(best, method=f"{best.method}, as if every link were the slowest")
    in_order = _OrderTask(
        states=task.states,
        cost_model=task.cost_model,
        topology=topology,
        num_devices=task.num_devices,
        updates=task.updates,
        most_replicas=task.most_replicas,
        fits=task.fits,
    )
    faster = _OrderSearch(in_order, best.bottleneck_seconds).result()
    method = f"{best.method}, devices in order"
    if faster is None:
        return replace(best, method=method)
    made = _partition(task, topology.cluster, *faster, method)
    return min(made, best, key=lambda partition: partition.bottleneck_seconds)


def _is_uniform(topology: Topology, num_devices: int) -> bool:
    """Whether any two devices have the same link, and all are equally fast."""
    speeds = {device.speed for device in topology.cluster.devices[:num_devices]}
    return not topology.wires and len(speeds) == 1 and len(set(topology.paths[:num_devices])) == 1


def _check(cluster: Cluster, updates: float, order: str, num_devices: int | None) -> int:
    one_of("order", order, ("execution", "any"))
    check_updates(updates)
    there = len(cluster.devices)
    if num_devices is None:
        return there
    if not is_whole(num_devices) or not 1 <= num_devices <= there:
        raise InputError(f"num_devices is {num_devices!r}, but must be between 1 and {there}")
    return num_devices


def _partition(
    task: FlatTask, cluster: Cluster, first: int, pieces: Sequence[Piece], method: str
) -> Partition:
    names = [layer.name for layer in task.states.graph.layers]
    stages, device = [], first
    for piece in pieces:
        layers = task.states.between(piece.start, piece.stop)
        devices = tuple(range(device, device + piece.replicas))
        stages.append(PartitionedStage(tuple(names[index] for index in layers), devices))
        device += piece.replicas
    made = Partition(tuple(stages), inf, method)
    graph = task.states.graph
    seconds = evaluate(graph, cluster, task.cost_model, made, task.updates)
    return replace(made, bottleneck_seconds=seconds)
