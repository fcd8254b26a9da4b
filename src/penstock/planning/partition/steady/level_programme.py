"""The dynamic programme behind ``planning.partition.steady.levels``, on tables of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod

from penstock.core.cluster import Link
from penstock.core.graph import LayerGraph
from penstock.planning.partition.arrays import Array, np
from penstock.planning.partition.chain import ROUNDING
from penstock.planning.partition.cost_models import RELEASED, CostModel
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
    numbers = zip(states.compute_seconds, states.parameter_bytes, strict=True)
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
    """What a level knows, for components from state ``[i]`` to state ``[j]``.

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
        seconds, sizes = self.states.compute_seconds, self.states.parameter_bytes
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
