"""``TaskDevices``: what the devices of a task have, how they look, and how they are joined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from functools import cached_property
from itertools import product
from math import inf

from penstock.base.kept import kept
from penstock.core.cluster import Device, Link, Topology
from penstock.core.timing.simulator.step import are_apart
from penstock.planning.partition.steady.evaluation import MANY_PAIRS, links_in_turns
from penstock.planning.planner.groups import TensorGroups
from penstock.planning.planner.hosts import Levels, RankPlaces, levels_worth_trying


class TaskDevices:
    """The devices of a cluster, of which each may stand for several that share layers.

    Args:
        topology: of the cluster.
        groups: those for which each device stands; the same ones again where the cluster has been
            made several times as large.
        memory_bytes: what a device may use, on top of the cluster's own limits.
    """

    def __init__(
        self, topology: Topology, groups: TensorGroups | None, memory_bytes: int | None
    ) -> None:
        self.topology = topology
        self.cluster = topology.cluster
        self._groups = groups
        self._memory_bytes = memory_bytes
        self._kinds: dict[Hashable, int] = {}

    def behind(self, index: int) -> tuple[Device, ...]:
        """The devices for which one of the cluster stands."""
        if self._groups is None:
            return (self.cluster.devices[index],)
        return self._groups.devices[index % len(self._groups.devices)]

    def num_behind(self, index: int) -> int:
        """How many devices one of the cluster stands for."""
        return len(self.behind(index))

    def num_on_card(self, index: int) -> int:
        """How many of the devices that one of the cluster stands for share a network card, of that
        which most share."""
        counts = (1,) if self._groups is None else self._groups.num_on_card
        return counts[index % len(counts)]

    @cached_property
    def straddling(self) -> frozenset[int]:
        """The devices that stand for groups whose devices are on several hosts."""
        apart = (False,) if self._groups is None else self._groups.straddle
        every = range(len(self.cluster.devices))
        return frozenset(device for device in every if apart[device % len(apart)])

    @cached_property
    def limits(self) -> tuple[float, ...]:
        """Bytes that each device may use."""
        everywhere = self._memory_bytes or inf
        return tuple(min(device.memory_bytes or inf, everywhere) for device in self.cluster.devices)

    @cached_property
    def tensor_limits(self) -> tuple[float, ...]:
        """The ``limits`` without what allocators take besides tensors."""
        return tuple(
            limit / (1 + device.allocator_slack)
            for limit, device in zip(self.limits, self.cluster.devices, strict=True)
        )

    @cached_property
    def memories(self) -> tuple[tuple[float, float], ...]:
        """(bytes that each device may use, what its allocator takes besides): all of a device that
        decides what fits."""
        slacks = (device.allocator_slack for device in self.cluster.devices)
        return tuple(zip(self.limits, slacks, strict=True))

    @cached_property
    def different_memories(self) -> frozenset[tuple[float, float]]:
        """The ``memories``, each once."""
        return frozenset(self.memories)

    def memories_of(self, devices: tuple[int, ...]) -> Collection[tuple[float, float]]:
        """The ``memories`` of some devices, each once, or more often."""
        if len(self.different_memories) == 1:
            return self.different_memories
        return [self.memories[device] for device in devices]

    def appearance(self, devices: Iterable[int]) -> Hashable:
        """All by which devices in an order differ from others: equal ones in equal groups may stand
        for each other."""
        places: dict[int, int] = {}
        return tuple(
            (
                self._looks[device],
                *(places.setdefault(number, len(places)) for number in self.topology.paths[device]),
            )
            for device in devices
        )

    @cached_property
    def _looks(self) -> tuple[int, ...]:
        """A number for each device that it has in common with those that are like it, and in groups
        like its own."""
        groups, known = self.cluster.groups, dict[Hashable, int]()
        wired = {device for pair in self.topology.wires for device in pair}
        looks = (
            (
                device.speed,
                device.kind,
                self.memories[index],
                self.num_behind(index),
                self.num_on_card(index),
                index if index in wired else -1,
                *(
                    (group.link, group.kind, group.memory_bytes, group.card)
                    for group in map(groups.__getitem__, self.topology.paths[index])
                ),
            )
            for index, device in enumerate(self.cluster.devices)
        )
        return tuple(known.setdefault(look, len(known)) for look in looks)

    @cached_property
    def is_flat(self) -> bool:
        """Whether all devices look alike, and none is nearer to another one than to the rest."""
        alone = Counter(number for path in self.topology.paths for number in path)
        return len({*self._looks}) == 1 and {*alone.values()} <= {1, len(self._looks)}

    @kept
    def kind_of(self, devices: tuple[int, ...]) -> int:
        """A number that some devices have in common with all that look like them."""
        return self._kinds.setdefault(self.appearance(devices), len(self._kinds))

    @kept
    def slowest_speed(self, devices: tuple[int, ...]) -> float:
        """The speed of the slowest of some devices."""
        return min(self.cluster.devices[device].speed for device in devices)

    @kept
    def rank_places(self, devices: tuple[int, ...]) -> RankPlaces:
        """Where ranks on these devices are."""
        return RankPlaces.on(self.topology, devices, self.straddling)

    @kept
    def levels(self, devices: tuple[int, ...]) -> list[Levels]:
        """The ways to sum near ranks first, where ranks are on these devices."""
        return levels_worth_trying(self.topology, devices, self.straddling)

    @kept
    def are_apart(self, devices: tuple[int, ...], num_pipelines: int) -> bool:
        """Whether pipelines side by side never wait for each other on their way.

        Args:
            devices: of each rank; copies of a rank follow one another.
        """
        cards, hosts = self.rank_places(devices)
        return not cards or are_apart(cards, hosts, num_pipelines)

    def are_crowded(self, devices: Collection[int], used: Collection[int]) -> bool:
        """Whether one of some devices shares its host's memory with another one that works."""
        return any(
            sum(map(self.num_behind, set(host) & set(used))) > 1 and set(host) & set(devices)
            for host, _ in self.topology.shared_memories
        )

    def link_between(self, sources: Sequence[int], targets: Sequence[int], num_bytes: int) -> Link:
        """The slowest link over which one stage's devices may send another's a message."""
        return slowest_of(self.links_between(tuple(sources), tuple(targets), False), num_bytes)

    @kept
    def links_between(
        self, sources: tuple[int, ...], targets: tuple[int, ...], in_turns: bool
    ) -> tuple[Link, ...]:
        """The different links between two stages' devices.

        Args:
            in_turns: whether microbatches go round both, so that not everybody meets everybody.
        """
        if in_turns:
            links: Iterable[Link] = links_in_turns(self.topology, sources, targets)
        elif len(sources) * len(targets) > MANY_PAIRS:
            links = dict.fromkeys(self.topology.links_among({*sources, *targets}))
        else:
            pairs = (pair for pair in product(sources, targets) if len({*pair}) > 1)
            links = dict.fromkeys(self.topology.link(*pair) for pair in pairs)
        return tuple(links)


def slowest_of(links: Iterable[Link], num_bytes: float) -> Link:
    """The link that takes longest for a message; one that takes no time where there is none."""
    return max(links, key=lambda link: link.seconds(num_bytes), default=Link())
