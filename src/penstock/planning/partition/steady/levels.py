"""PipeDream's own dynamic programme, level by level of a regular tree of devices.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section
3.1. Level k joins m_k groups of level k−1 over links of bandwidth B_k; a device is a group of level
0. A *component* is a range of layers on one such group. With T_l seconds for layer l:

- A⁰(i→j) = Σ T_l, and m_0 = 1
- T^k(i→j, m): a component of layers i to j, planned as A^{k−1}(i→j, m_{k−1}), on each of m groups
- A^k(i→j, m) = min{T^k(i→j, m), min_{s,m'} max{A^k(i→s, m−m'), cut behind s, T^k(s+1→j, m')}}

What T^k and a cut take is up to the cost model: ``CostModel.shared_seconds``, with a component's
seconds in the place of compute, and ``CostModel.cut_seconds``. ``pipedream-released`` has a quirk:
where a component is the first of its pipeline, the published optimizer divides its exchange of
gradients by the devices of a group, as if they shared the work.

Plans are nested: a pipeline inside each server may be replicated as a whole, or servers may be
stages, but no stage takes part of one server and part of another. ``best_partition`` looks at these
plans too. Cuts are behind prefixes of the execution order. Groups may be left over at any level;
the original uses all of them. Both sides of a cut are charged for it, so that the side with fewer
replicas counts; the original forgets a pipeline's first component.

The dynamic programme behind ``planning.partition.steady.levels``, on tables of numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod

import numpy as np

from penstock.base.errors import InputError
from penstock.core.cluster import Cluster, Link, Topology
from penstock.core.graph import LayerGraph
from penstock.planning.partition.chain import RELEASED, ROUNDING, Array, CostModel, check_updates
from penstock.planning.partition.steady.evaluation import (
    Partition,
    PartitionedStage,
    evaluate,
    link_within,
    members_at,
)
from penstock.planning.partition.steady.states import States, prefixes

MOST_STEPS = 1_500_000_000
"""Numbers that the programme may compare; beyond that it takes seconds."""


@dataclass(frozen=True)
class Levels:
    """A regular tree: all groups of a level have as many members and the same link.

    Attributes:
        counts: members of a group of each level, innermost first.
        links: between the members of a group of each level.
        devices: the cluster's, by index, those of a group next to each other.
    """

    counts: tuple[int, ...]
    links: tuple[Link, ...]
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Component:
    """Layers on one or several groups of a level.

    Attributes:
        start: its first layer, by index.
        stop: the first layer behind it.
        replicas: groups of the level below that run it, each on its own microbatches.
        inner: what each of these groups does, as components of the level below; empty where the
            group is a device.
    """

    start: int
    stop: int
    replicas: int
    inner: tuple[Component, ...] = ()


def worth_cutting(graph: LayerGraph) -> States:
    """The prefixes that a best plan may cut behind: of those that differ only in layers without
    seconds and parameters, the one whose cut takes fewest bytes."""
    states = prefixes(graph)
    numbers = zip(states.compute_seconds, states.gradient_bytes, strict=True)
    kept: list[int] = []
    last: tuple[float, float] | None = None
    for state, (seconds, size) in enumerate(numbers):
        if (seconds, size) != last:
            kept.append(state)
        elif kept[-1] and states.cut_bytes[state] <= states.cut_bytes[kept[-1]]:
            kept[-1] = state  # as nothing leaves the last state, it is always kept
        last = (seconds, size)
    if len(kept) == 1:
        kept.append(len(states.sets) - 1)
    return States(graph, tuple(states.sets[state] for state in kept), is_all=False)


def steps(num_states: int, counts: Sequence[int], updates: float) -> int:
    """How many numbers the programme compares, about.

    Args:
        num_states: places to cut, with both ends.
        counts: members of a group of each level, innermost first.
        updates: per microbatch; groups that get fewer microbatches need tables of their own.
    """
    rates, total, each = {updates}, 0, 2 * num_states**2
    for count in reversed(counts):
        total += len(rates) * each * count * (count - 1) // 2
        rates = {min(1.0, rate * number) for rate in rates for number in range(1, count + 1)}
        each = num_states**3 // 3
    return total


@dataclass
class _LevelTable:
    """The tables of a level, for components from state ``[i]`` to state ``[j]``.

    Attributes:
        first: by m − 1, T^k on m groups.
        later: the same for what is not first in its pipeline, with the cut before it.
        handing_on: by m − 1, the best on at most m groups, with the cut behind j.
        whole: the best on all groups of the level, without that cut.
    """

    first: list[Array]
    later: list[Array]
    handing_on: list[Array]
    whole: Array


class Programme:
    """A^k and T^k of one model on one tree.

    Args:
        states: that may be cut behind.
        levels: the cluster's tree.
        cost_model: what stages and cuts cost.
        updates: per microbatch of the whole plan.
    """

    def __init__(
        self, states: States, levels: Levels, cost_model: CostModel, updates: float
    ) -> None:
        self.states, self.levels = states, levels
        self.cost_model, self.updates = cost_model, updates
        self.tables: dict[tuple[int, float], _LevelTable] = {}

    @cached_property
    def layers(self) -> tuple[Array, Array]:
        """(seconds, parameter bytes) of a component; infinitely long where there is none."""
        seconds, sizes = self.states.compute_seconds, self.states.gradient_bytes
        compute = np.where(self.states.nested, seconds[None] - seconds[:, None], inf)
        return compute, np.maximum(sizes[None] - sizes[:, None], 0.0)

    def result(self) -> tuple[tuple[Component, ...], float]:
        """The best components of the outermost level, and their value."""
        top = len(self.levels.counts) - 1
        objective = float(self._table(top, self.updates).whole[0, -1])
        end = len(self.states.sets) - 1
        return tuple(self._components(top, self.updates, 0, end)), objective

    def _seconds(self, level: int, updates: float) -> Array:
        """A of a group of the level below."""
        return self._table(level - 1, updates).whole if level else self.layers[0]

    def _table(self, level: int, updates: float) -> _LevelTable:
        key = (level, updates)
        if key not in self.tables:
            self.tables[key] = self._filled(level, updates)
        return self.tables[key]

    def _filled(self, level: int, updates: float) -> _LevelTable:
        count = self.levels.counts[level]
        # Nobody asks the outermost level for components that begin behind the model's input.
        rows = 1 if level == len(self.levels.counts) - 1 else len(self.states.sets)
        cuts = self._cuts(level)
        first, later = [], []
        for number, cut in enumerate(cuts, 1):
            own, exchange = self._parts(level, updates, number)
            devices = prod(self.levels.counts[:level])
            quirk = devices if self.cost_model.name == RELEASED else 1
            first.append(self.cost_model.together(own, exchange / quirk))
            later.append(np.maximum(self.cost_model.together(own, exchange), cut[:, None]))
        handing_on: list[Array] = []
        whole = first[0][:rows]
        for total in range(1, count + 1):
            best = first[total - 1][:rows].copy()
            behind = np.maximum(best, cuts[total - 1])
            for last in range(1, total):
                two_parts = _through(handing_on[total - last - 1], later[last - 1])
                np.minimum(best, two_parts, out=best)
                np.minimum(behind, np.maximum(two_parts, cuts[last - 1]), out=behind)
            if handing_on:
                np.minimum(best, whole, out=best)
                np.minimum(behind, handing_on[-1], out=behind)
            handing_on.append(behind)
            whole = best
        return _LevelTable(first, later, handing_on, whole)

    def _parts(self, level: int, updates: float, number: int) -> tuple[Array, Array]:
        """(compute, exchange of gradients) of components on so many groups, per microbatch."""
        model, link = self.cost_model, self.levels.links[level]
        own = self._seconds(level, min(1.0, updates * number)) / number
        slope, base = model.reduce_line(number, link)
        return own, (slope * self.layers[1] + base) * min(updates, 1 / number)

    def _cuts(self, level: int) -> list[Array]:
        """By m − 1, seconds of a cut behind each state, of a component on m groups."""
        model, link = self.cost_model, self.levels.links[level]
        return [
            np.array([model.cut_seconds(size, number, link) for size in self.states.cut_bytes])
            for number in range(1, self.levels.counts[level] + 1)
        ]

    def _components(self, level: int, updates: float, start: int, stop: int) -> Iterator[Component]:
        """The plan that a group of a level has for a component: what gave its value."""
        table, cuts = self._table(level, updates), self._cuts(level)
        backwards: list[Component] = []
        left, sought, is_last = self.levels.counts[level], float(table.whole[start, stop]), True
        while stop > start:
            begin, number = self._last_stage(table, cuts, (start, stop), left, sought, is_last)
            inner: tuple[Component, ...] = ()
            if level:
                rate = min(1.0, updates * number)
                inner = tuple(self._components(level - 1, rate, begin, stop))
            backwards.append(Component(self._layer(begin), self._layer(stop), number, inner))
            left, stop, is_last = left - number, begin, False
            if stop > start:
                sought = float(table.handing_on[left - 1][start, stop])
        return reversed(backwards)

    def _layer(self, state: int) -> int:
        return self.states.sets[state].bit_length()

    def _last_stage(
        self,
        table: _LevelTable,
        cuts: Sequence[Array],
        bounds: tuple[int, int],
        left: int,
        sought: float,
        is_last: bool,
    ) -> tuple[int, int]:
        """(where it begins, groups) of a last stage that is no slower than what is sought."""
        start, stop = bounds
        limit = sought * (1 + ROUNDING)
        for number in range(left, 0, -1):
            if not is_last and cuts[number - 1][stop] > limit:
                continue
            if table.first[number - 1][start, stop] <= limit:
                return start, number
            if number < left and stop > start + 1:
                before = table.handing_on[left - number - 1][start]
                worst = np.maximum(before, table.later[number - 1][:, stop])[start + 1 : stop]
                place = int(worst.argmin())
                if worst[place] <= limit:
                    return start + 1 + place, number
        raise AssertionError("a value of the programme came from none of its choices")


def _through(before: Array, after: Array) -> Array:
    """The least maximum of a way from row to column over one place between.

    Args:
        before: to each place, a row for each start.
        after: from each place.
    """
    least = np.full((len(before), after.shape[1]), inf)
    if len(before) == 1:
        np.minimum(least, np.maximum(before[0][:, None], after).min(axis=0), out=least)
        return least
    for place in range(1, after.shape[1] - 1):
        part = least[:place, place + 1 :]
        way = np.maximum(before[:place, place, None], after[None, place, place + 1 :])
        np.minimum(part, way, out=part)
    return least


@dataclass(frozen=True)
class NestedPartition:
    """The partition that the programme over the levels of a cluster found.

    Attributes:
        components: those of the outermost level, from the model's input to its output.
        objective_seconds: A^L of the whole model, the programme's own value. It takes the exchange
            of a replicated component as one that all its parameters make together, once for each
            microbatch that a group gets.
        partition: the same as stages. A component on m groups gives each of its inner stages m
            times the replicas; microbatch k is on the group k modulo m. Its ``bottleneck_seconds``
            are those of ``evaluate``: every stage exchanges its own gradients, and less often if it
            has replicas inside too. With ``ring`` that is never more than the objective. With the
            other two it may be: of the published optimizer's because of its quirk, of the paper's
            because cuts are shared by replicas inside a component only. To compare nested plans
            with others, compare these.
    """

    components: tuple[Component, ...]
    objective_seconds: float
    partition: Partition


def levels_of(cluster: Cluster) -> Levels | None:
    """The levels of a cluster, or ``None`` where it is no regular tree.

    Args:
        cluster: regular if no pair has a wire of its own, devices are equally fast, and all groups
            of a level have as many members and the same link.
    """
    topology = Topology(cluster)
    paths = topology.paths
    if topology.wires or len({len(path) for path in paths}) > 1:
        return None
    if len({device.speed for device in cluster.devices}) > 1:
        return None
    counts, links = [], []
    for depth in range(len(paths[0]), -1, -1):
        members = members_at(topology, depth, range(len(paths)))
        sizes = {len(inner) for inner in members.values()}
        there = {link_within(topology, path) for path in members}
        if len(sizes) > 1 or len(there) > 1:
            return None
        counts.append(sizes.pop())
        links.append(there.pop())
    order = sorted(range(len(paths)), key=lambda index: (paths[index], index))
    return Levels(tuple(counts), tuple(links), tuple(order))


def nested_partition(
    graph: LayerGraph, cluster: Cluster, cost_model: CostModel, *, updates: float = 1.0
) -> NestedPartition:
    """The best nested plan, by PipeDream's programme.

    Args:
        graph: the model, cut in its execution order. Parameters that several layers share count in
            each.
        cluster: a regular tree.
        cost_model: what stages and cuts cost.
        updates: per microbatch, as in ``CostModel.shared_seconds``. A group that gets every m-th
            microbatch has m times as many per microbatch of its own.

    Raises:
        InputError: the cluster is no regular tree, or ``updates`` has no meaning.
    """
    levels = levels_of(cluster)
    if levels is None:
        raise InputError(
            "the level-by-level programme needs a regular tree: equally fast devices, groups of "
            "equal size and link at each level, and no wires; ask best_partition instead"
        )
    check_updates(updates)
    programme = Programme(worth_cutting(graph), levels, cost_model, updates)
    components, objective = programme.result()
    partition = _flat(graph, levels, components)
    seconds = evaluate(graph, cluster, cost_model, partition, updates)
    return NestedPartition(components, objective, replace(partition, bottleneck_seconds=seconds))


def _flat(graph: LayerGraph, levels: Levels, components: Sequence[Component]) -> Partition:
    """Nested components as stages with devices."""
    stages = tuple(
        PartitionedStage(
            tuple(layer.name for layer in graph.layers[component.start : component.stop]),
            tuple(levels.devices[place] for place in places),
        )
        for component, places in _placed(levels, len(levels.counts) - 1, components, [0])
    )
    return Partition(stages, inf, "PipeDream's programme, level by level")


def _placed(
    levels: Levels, level: int, components: Sequence[Component], groups: Sequence[int]
) -> Iterator[tuple[Component, list[int]]]:
    """(component, places) of every stage, where several groups of a level all do the same.

    Args:
        groups: the first place of each, in the order in which they get microbatches.
    """
    size, taken = prod(levels.counts[:level]), 0
    for component in components:
        # Which of the groups comes first: then a microbatch stays in its own from stage to stage.
        own = [group + (taken + k) * size for k in range(component.replicas) for group in groups]
        taken += component.replicas
        if level:
            yield from _placed(levels, level - 1, component.inner, own)
        else:
            yield component, own
