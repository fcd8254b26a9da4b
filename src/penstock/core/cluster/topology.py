"""``Topology``: what a cluster's tree says, by the indices of its devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import comb

from penstock.core.cluster.cluster import Cluster
from penstock.core.cluster.parts import Link

_WHOLE = -1
"""In place of a group's index: the cluster itself."""


@dataclass(frozen=True)
class Topology:
    """What a cluster's tree says, by the indices of its devices.

    Args:
        cluster: whose. What is asked often is worked out once per ``Topology``; keep it.
    """

    cluster: Cluster

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The groups that each device is in, outermost first, by their indices."""
        parent = {
            member: index
            for index, group in enumerate(self.cluster.groups)
            for member in group.members
        }

        def upward(name: str) -> Iterator[int]:
            while name in parent:
                yield parent[name]
                name = self.cluster.groups[parent[name]].name

        return tuple(tuple(upward(device.name))[::-1] for device in self.cluster.devices)

    @cached_property
    def wires(self) -> dict[tuple[int, int], Link]:
        """The links of pairs that have one of their own; the lower index comes first."""
        place = {device.name: index for index, device in enumerate(self.cluster.devices)}
        links = {}
        for wire in self.cluster.wires:
            first, second = sorted(place[name] for name in wire.between)
            links[first, second] = wire.link
        return links

    def link(self, first: int, second: int) -> Link:
        """The link between two different devices."""
        if self.wires:
            pair = (first, second) if first < second else (second, first)
            wire = self.wires.get(pair)
            if wire is not None:
                return wire
        return self._link_of(self._common(first, second))

    def slowest_link(self, devices: Collection[int], num_bytes: float = 2**20) -> Link:
        """The link, among those between any two of some devices, that takes longest for a message;
        a link without cost for fewer than two devices.

        Args:
            devices: their indices in the cluster.
            num_bytes: how long the message is.
        """
        chosen = sorted(set(devices))
        if comb(len(chosen), 2) <= max(1, len(self.wires)):
            links = [self.link(*pair) for pair in combinations(chosen, 2)]
        else:
            links = self._links_among(chosen)
        return max(links, key=lambda link: link.seconds(num_bytes), default=Link())

    def _links_among(self, chosen: Sequence[int]) -> list[Link]:
        """Every link that joins two of them, found without looking at each pair: how many pairs
        meet in a group is how many there are in it, less those that meet further in."""
        inside = Counter(group for k in chosen for group in (_WHOLE, *self.paths[k]))
        pairs = {group: comb(count, 2) for group, count in inside.items()}
        meeting = dict(pairs)
        for group, count in pairs.items():
            if group != _WHOLE:
                meeting[self._parents[group]] -= count
        members = set(chosen)
        links = []
        for (first, second), link in self.wires.items():
            if first in members and second in members:
                meeting[self._common(first, second)] -= 1
                links.append(link)
        return links + [self._link_of(group) for group, count in meeting.items() if count]

    def _common(self, first: int, second: int) -> int:
        """The smallest group that has both devices."""
        shared = _WHOLE
        for group, other in zip(self.paths[first], self.paths[second], strict=False):
            if group != other:
                break
            shared = group
        return shared

    def _link_of(self, group: int) -> Link:
        return self.cluster.link if group == _WHOLE else self.cluster.groups[group].link

    @cached_property
    def _parents(self) -> dict[int, int]:
        """The group that each group with devices is in."""
        return {
            group: outer
            for path in self.paths
            for outer, group in zip((_WHOLE, *path), path, strict=False)
        }

    @cached_property
    def shared_memories(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """(devices, bytes) of every memory that several devices share; the cluster's comes last."""
        groups = self.cluster.groups
        holders: dict[int, list[int]] = {
            index: [] for index, group in enumerate(groups) if group.memory_bytes
        }
        for device, path in enumerate(self.paths):
            for index in path:
                if index in holders:
                    holders[index].append(device)
        memories = [(tuple(held), groups[index].memory_bytes) for index, held in holders.items()]
        if self.cluster.memory_bytes:
            memories.append((tuple(range(len(self.cluster.devices))), self.cluster.memory_bytes))
        return tuple(memories)
