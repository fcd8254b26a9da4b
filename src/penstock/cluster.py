"""Where a model can be spread: ``Device``, ``Link``, ``Cluster``.

A cluster is a list of devices, and a tree that says how they are joined: groups of devices (a
server), groups of groups (a rack). Two devices talk over the link of the smallest group that has
both, unless a wire of their own is named.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from math import prod
from pathlib import Path

from msgspec.structs import replace

from penstock.errors import InputError
from penstock.values import Value


class Device(Value, frozen=True, kw_only=True):
    """One place that runs a rank's ops, one at a time.

    Attributes:
        name: for people, for example ``cpu0``.
        memory_bytes: what a rank may use here; 0 means not limited.
        speed: relative to the machine the profile was measured on (2.0 is twice as fast).
    """

    name: str
    memory_bytes: int = 0
    speed: float = 1.0

    def __post_init__(self) -> None:
        if self.memory_bytes < 0:
            raise InputError(f"device {self.name!r}: memory_bytes is {self.memory_bytes} < 0")
        if not self.speed > 0:
            raise InputError(f"device {self.name!r}: speed is {self.speed}, but must be > 0")


class Link(Value, frozen=True, kw_only=True):
    """How neighbouring devices are joined.

    Attributes:
        latency_seconds: time before the first byte arrives.
        bytes_per_second: bandwidth after that; 0 means so high that it does not count (for
            example threads that share memory).
    """

    latency_seconds: float = 0.0
    bytes_per_second: float = 0.0

    def __post_init__(self) -> None:
        if self.latency_seconds < 0 or self.bytes_per_second < 0:
            raise InputError("a link's latency and bandwidth must be ≥ 0")

    def seconds(self, num_bytes: float) -> float:
        """Time from sending ``num_bytes`` until they have arrived."""
        transfer = num_bytes / self.bytes_per_second if self.bytes_per_second else 0.0
        return self.latency_seconds + transfer


class Group(Value, frozen=True, kw_only=True):
    """Devices that are nearer to each other than to the rest, as those of one server.

    Attributes:
        name: for people; unlike that of any device or other group.
        members: names of devices or of other groups, at least one.
        link: between any two members.
        memory_bytes: memory that all devices in it share (cores of one host), or 0 when each has
            its own.
    """

    name: str
    members: tuple[str, ...]
    link: Link = Link()
    memory_bytes: int = 0


class Wire(Value, frozen=True, kw_only=True):
    """What joins two devices, instead of what their groups say.

    Attributes:
        between: their names.
        link: in both directions.
    """

    between: tuple[str, str]
    link: Link


class SpareMachine(Value, frozen=True, kw_only=True):
    """A machine without accelerators that can sum gradients for others.

    Attributes:
        name: for people.
        bytes_per_second: of its network, in each direction.
    """

    name: str
    bytes_per_second: float


class Cluster(Value, frozen=True, kw_only=True):
    """Devices and how they are joined.

    Attributes:
        devices: at least one; names unique. By default rank i of a plan runs on device i.
        link: between any two devices or groups that no group has.
        memory_bytes: memory all devices share (cores of one host), or 0 when each has its own.
        groups: servers, racks and so on; nobody is a member twice.
        wires: pairs of devices with a link of their own.
        spares: machines that can sum gradients.
    """

    devices: tuple[Device, ...]
    link: Link = Link()
    memory_bytes: int = 0
    groups: tuple[Group, ...] = ()
    wires: tuple[Wire, ...] = ()
    spares: tuple[SpareMachine, ...] = ()

    def __post_init__(self) -> None:
        if not self.devices:
            raise InputError("a Cluster needs at least one device")
        if self.memory_bytes < 0:
            raise InputError(f"cluster memory_bytes is {self.memory_bytes}, but must be ≥ 0")

    @classmethod
    def tree(
        cls, counts: Sequence[int], links: Sequence[Link], *, device: Device | None = None
    ) -> Cluster:
        """A regular tree.

        Args:
            counts: how many members the groups of each level have, innermost first: ``(4, 2)`` is
                two servers of four devices.
            links: between the members of a group of each level, innermost first.
            device: what all devices are like; its name is not used.
        """
        pattern = device or Device(name="")
        names = [f"device{index}" for index in range(prod(counts))]
        devices = tuple(replace(pattern, name=name) for name in names)
        groups: list[Group] = []
        for level, (count, link) in enumerate(zip(counts[:-1], links[:-1], strict=True)):
            parts = [tuple(names[at : at + count]) for at in range(0, len(names), count)]
            word = "server" if level == 0 else f"level{level}-"
            made = [
                Group(name=f"{word}{index}", members=members, link=link)
                for index, members in enumerate(parts)
            ]
            groups += made
            names = [group.name for group in made]
        return cls(devices=devices, link=links[-1], groups=tuple(groups))

    @classmethod
    def local(cls, num_devices: int | None = None) -> Cluster:
        """The CPU cores of this machine that this process may use, sharing its memory.

        Args:
            num_devices: use this many workers instead of one per core.

        Raises:
            InputError: ``num_devices`` is below 1.
        """
        count = _usable_cores() if num_devices is None else num_devices
        if count < 1:
            raise InputError(f"num_devices is {count}, but must be ≥ 1")
        devices = tuple(Device(name=f"cpu{index}") for index in range(count))
        return cls(devices=devices, memory_bytes=_memory_bytes())


@dataclass(frozen=True)
class Topology:
    """What a cluster's tree says, by the indices of its devices."""

    cluster: Cluster

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Of each device, the groups that it is in, outermost first, by their indices."""
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
    def wires(self) -> dict[frozenset[int], Link]:
        """The links of pairs that have one of their own."""
        place = {device.name: index for index, device in enumerate(self.cluster.devices)}
        return {
            frozenset(place[name] for name in wire.between): wire.link
            for wire in self.cluster.wires
        }

    def link(self, first: int, second: int) -> Link:
        """Between two different devices."""
        if self.wires:
            own = self.wires.get(frozenset((first, second)))
            if own is not None:
                return own
        shared = -1
        for one, other in zip(self.paths[first], self.paths[second], strict=False):
            if one != other:
                break
            shared = one
        return self.cluster.link if shared < 0 else self.cluster.groups[shared].link

    def slowest_link(self, devices: Collection[int], num_bytes: float = 2**20) -> Link:
        """Of the links between any two of some devices, the one that takes longest for a message;
        a link without cost for fewer than two devices."""
        chosen = sorted(devices)
        # A tree's worst pair spans the widest group, so neighbours in the list show every level;
        # wires can lie anywhere.
        pairs: Iterator[tuple[int, int]] = (
            combinations(chosen, 2) if self.wires else iter(pairwise(chosen))
        )
        links = [self.link(*pair) for pair in pairs]
        return max(links, key=lambda link: link.seconds(num_bytes), default=Link())

    @cached_property
    def shared_memories(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """(devices, bytes) of every memory that several devices share."""
        found = [
            (tuple(k for k, path in enumerate(self.paths) if index in path), group.memory_bytes)
            for index, group in enumerate(self.cluster.groups)
            if group.memory_bytes
        ]
        if self.cluster.memory_bytes:
            found.append((tuple(range(len(self.cluster.devices))), self.cluster.memory_bytes))
        return tuple(found)


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int:
    """This host's memory or the container's limit, whichever is less; 0 where neither is told."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        return physical
    return min(physical, limit)
