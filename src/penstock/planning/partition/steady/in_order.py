"""Partitions whose stages take devices in the cluster's order, each link at its true speed.

A stage may begin and end anywhere, also in the midst of a server. What an exchange of gradients
costs depends on which devices take part, and what a cut costs on both of its stages, so a dynamic
programme goes over (state, first device, slowest link that the cut before may take), from the end
of the model to its beginning. Devices that are left over at the end count as busy
where microbatches in flight are counted; that is cautious, not exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import ceil, inf

from penstock.core.cluster import Link, Topology
from penstock.planning.partition.arrays import Array, np
from penstock.planning.partition.chain import ROUNDING
from penstock.planning.partition.cost_models import CostModel
from penstock.planning.partition.steady.evaluation import exchange_lines
from penstock.planning.partition.steady.pieces import Fits, Piece
from penstock.planning.partition.steady.states import States
from penstock.planning.partition.steady.tree import usual_seconds


@dataclass(frozen=True)
class OrderTask:
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
class _Choices:
    """Arrays ``[link, state]``: how fast the rest can be, and how its first stage then is."""

    seconds: Array
    next_device: Array
    next_state: Array
    next_link: Array


def search_in_order(task: OrderTask, below: float) -> tuple[int, tuple[Piece, ...]] | None:
    """The best partition that is faster than ``below`` seconds, if there is one.

    Returns:
        Its first device, and its stages; devices follow each other.
    """
    return _OrderSearch(task, below).result()


@dataclass
class _OrderSearch:
    task: OrderTask
    below: float
    table: dict[int, _Choices] = field(default_factory=dict)

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

    def _blank(self) -> _Choices:
        shape = self.task.cuts.shape
        numbers = [np.zeros(shape, dtype=np.int32) for _ in range(3)]
        blank = _Choices(np.full(shape, inf), *numbers)
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

    def _from(self, device: int) -> _Choices:
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

    def _try(self, made: _Choices, rows: Array, device: int, behind: int) -> None:
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
        sizes = states.parameter_bytes[columns][None] - states.parameter_bytes[rows][:, None]
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
