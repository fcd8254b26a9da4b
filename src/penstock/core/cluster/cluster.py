"""``Cluster``: devices and how they are joined. A file people write and edit.

``Topology`` is what a cluster's tree says, by the indices of its devices; ``only`` takes some
devices of a cluster, joined as they are in the whole.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, combinations_with_replacement
from math import comb, prod
from pathlib import Path
from typing import Self

from msgspec.structs import replace

from penstock.base.arguments import public
from penstock.base.errors import InputError
from penstock.base.lazily import method_provided
from penstock.base.values import MOST_TOML_BYTES, Value, expect, read_as, read_text, whole
from penstock.core.cluster import from_catalogue, local
from penstock.core.cluster.local import measured_tier
from penstock.core.cluster.parts import (
    MOST_DEVICES,
    Card,
    Device,
    DeviceKind,
    Group,
    Link,
    SpareMachine,
    Tier,
    Wire,
    check_cards,
    check_groups,
    check_names,
    check_wires,
)


class Cluster(Value, frozen=True, kw_only=True):
    """Devices and how they are joined.

    Attributes:
        devices: at least one. By default rank i of a plan runs on device i.
        link: between any two devices or groups that no group has, besides the cards that the way
            passes.
        memory_bytes: memory all devices share (cores of one host), or 0 when each has its own.
        groups: servers, racks and so on; nobody is a member twice.
        wires: pairs of devices with a link of their own.
        spares: machines that can sum gradients.
        tiers: where ranks may keep stages that are not in memory (``docs/larger-than-memory.md``).
        hardware: short name of its devices in the catalogue (``Cluster.of``); empty where nobody
            says.
        assumed: what nobody knows of these machines and is taken to be so, in a sentence.

    Raises:
        InputError: no device, a negative memory, a name that two have, a member or the end of a
            wire that is not there, a member twice, a circle of groups, a device behind two cards,
            or a pair with two wires.
    """

    devices: tuple[Device, ...]
    link: Link = Link()
    memory_bytes: int = 0
    groups: tuple[Group, ...] = ()
    wires: tuple[Wire, ...] = ()
    spares: tuple[SpareMachine, ...] = ()
    tiers: tuple[Tier, ...] = ()
    hardware: str = ""
    assumed: str = ""

    def __post_init__(self) -> None:
        self.check_fields()
        if not self.devices:
            raise InputError("a Cluster needs at least one device")
        whole("the number of devices", len(self.devices), 1, MOST_DEVICES)
        names = [device.name for device in self.devices]
        check_names(self.devices, self.groups, self.spares)
        check_groups(names, self.groups)
        check_cards(self.groups)
        check_wires(names, self.wires)

    _repr_html_ = method_provided("cluster_cell")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a cluster from a file.

        Args:
            path: ends in ``.toml`` for what people write (``docs/clusters.md``); anything else is
                JSON, as ``save`` writes it.

        Raises:
            FileError: the file is not there, an unknown key, a wrong type or unit, or parts that
                contradict each other; the path inside the file is named where there is one.
        """
        expect(path, str | os.PathLike, "the path", "give a file's name")
        if Path(path).suffix.lower() != ".toml":
            return cls.from_json(read_text(path), where=str(path))
        return cls.from_toml(read_text(path, MOST_TOML_BYTES), where=str(path))

    @classmethod
    def from_toml(cls, text: str, where: str = "text") -> Self:
        """Read what people write, with units and servers; see ``docs/clusters.md``.

        Args:
            text: TOML.
            where: the name to use in errors, for example the path of the file.

        Raises:
            FileError: as ``load``.
        """
        from penstock.core.cluster import (
            written,  # takes as long to load as all the rest of this room
        )

        expect(text, str, "the text", "give TOML")
        with read_as("Cluster", text, where):
            return cls(**written.read(text))

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

        Raises:
            InputError: no levels, a count below 1, or not one link per level.
        """
        _check_levels(counts, links)
        expect(device, Device | None, "device", "give a penstock.Device, whose name is not used")
        pattern = device or Device(name="device")
        names = [f"device{index}" for index in range(prod(counts))]
        devices = tuple(replace(pattern, name=name) for name in names)
        groups: list[Group] = []
        for level, (count, link) in enumerate(zip(counts[:-1], links[:-1], strict=True)):
            parts = [tuple(names[first : first + count]) for first in range(0, len(names), count)]
            word = "server" if level == 0 else f"level{level}-"
            made = [
                Group(name=f"{word}{index}", members=members, link=link)
                for index, members in enumerate(parts)
            ]
            groups += made
            names = [group.name for group in made]
        return cls(devices=devices, link=links[-1], groups=tuple(groups))

    @classmethod
    @public(
        remedies={
            "num_hosts": "give hosts=…",
            "device": 'its name comes first, as Cluster.of("h100-sxm", hosts=8)',
            "devices": "give hosts=… and devices_per_host=…",
            "gpus": "give hosts=… and devices_per_host=…",
            "num_devices": "give hosts=… and devices_per_host=…",
        }
    )
    def of(
        cls, name: str, *, hosts: int | None = None, devices_per_host: int | None = None
    ) -> Self:
        """Machines of the catalogue (``penstock devices``), which one need not have.

        Links and cards reach 77 % of their rates, as collectives do; memory is as sold, in decimal
        bytes, which leaves about a fifteenth to the driver.

        Args:
            name: of a host, as ``"dgx-h100"``, or of a device, whose usual host is taken, or one
                like that of a similar device, as ``assumed`` says then. With a number in front,
                so many hosts, ``"8xdgx-h100"``, or devices, ``"16xh100-sxm"``.
            hosts: how many machines; 1 by default.
            devices_per_host: how many of their devices are used; all by default.

        Raises:
            InputError: nothing in the catalogue has that name (the nearest are offered), no host of
                it has that device, or a count is impossible.
        """
        return cls(**from_catalogue.fields_of(name, hosts, devices_per_host))

    @classmethod
    def local(
        cls,
        num_devices: int | None = None,
        kind: DeviceKind = "cpu",
        *,
        tiers: Sequence[Tier] = (),
    ) -> Cluster:
        """This machine: the CPU cores that this process may use, or its accelerators.

        Links are without cost, since nobody has measured them (``penstock measure-cluster`` does).

        Args:
            num_devices: how many. By default one worker per core, or all accelerators; more workers
                than cores may be asked for, more accelerators may not.
            kind: ``"cpu"`` for cores, which share the host's memory, or ``"gpu"`` for accelerators
                of any make, each with its own: those of torch where it is loaded. Where it is not,
                and the driver has no program that tells of them, a second process asks torch,
                which takes seconds.
            tiers: where ranks may keep stages that are not in memory. Speeds that are not written
                down are measured, with a file of 32 MiB; where ranks are cores, these compute
                meanwhile.

        Raises:
            InputError: ``num_devices`` is below 1, no such kind, or not so many accelerators.
            FileError: a tier's folder cannot be written to.
        """
        devices, memory_bytes = local.devices(num_devices, kind)
        expect(tiers, list | tuple, "tiers", "give a list, as in [pk.Tier(folder='/scratch')]")
        for tier in tiers:
            expect(tier, Tier, "one of tiers", "give a penstock.Tier for each")
        timed = tuple(measured_tier(tier, computes_on_host=kind == "cpu") for tier in tiers)
        return cls(devices=devices, memory_bytes=memory_bytes, tiers=timed)


def _check_levels(counts: Sequence[int], links: Sequence[Link]) -> None:
    expect(counts, list | tuple, "counts", "give a list, innermost first, as in (4, 2)")
    expect(links, list | tuple, "links", "give a list, innermost first")
    for link in links:
        expect(link, Link, "one of links", "give a penstock.Link for each level")
    if not counts:
        raise InputError("a tree needs at least one level; give counts, for example (4, 2)")
    if len(counts) != len(links):
        raise InputError(
            f"a tree with {len(counts)} counts needs as many links, innermost first, not "
            f"{len(links)}"
        )
    for count in counts:
        whole("a count of a tree", count, 1, MOST_DEVICES)
    whole("the number of devices", prod(counts), 1, MOST_DEVICES)


_WHOLE = -1
"""In place of a group's index: the cluster itself."""


@dataclass(frozen=True)
class Topology:
    """The tree of a cluster, by the indices of its devices.

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

    @cached_property
    def cards(self) -> tuple[int, ...]:
        """The network card of each device: the number of the group whose members share it, or −1
        where nobody says. A way inside a host does not pass it."""
        with_card = {number for number, group in enumerate(self.cluster.groups) if group.card}
        return tuple(next((g for g in path if g in with_card), -1) for path in self.paths)

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        """The host of each device: the number of the outermost group of it that has a card, or says
        of which kind its link inside is; of a device in no such group, a number < 0 of its own."""
        groups = self.cluster.groups
        inside = {n for n, group in enumerate(groups) if group.card or group.kind}
        return tuple(
            next((group for group in path if group in inside), -1 - device)
            for device, path in enumerate(self.paths)
        )

    def card(self, number: int) -> Card:
        """The card of a group that has one, by the group's number."""
        card = self.cluster.groups[number].card
        assert card is not None, "cards are what groups with a card have"
        return card

    def cards_between(self, first: int, second: int) -> tuple[int, ...]:
        """The cards that a message from one device to another passes: the sender's, and the
        receiver's; none inside a host."""
        ends = self.cards[first], self.cards[second]
        apart = self.hosts[first] != self.hosts[second]
        return tuple(card for card in ends if card >= 0) if apart else ()

    def link(self, first: int, second: int) -> Link:
        """The link between two different devices, for a message that has the way to itself: as slow
        as the slowest card on it, and as late as all of them."""
        if self.wires:
            pair = (first, second) if first < second else (second, first)
            wire = self.wires.get(pair)
            if wire is not None:
                return wire
        cards = map(self.card, self.cards_between(first, second))
        return _through(self._link_of(self._common(first, second)), cards)

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
            links = self.links_among(chosen)
        return max(links, key=lambda link: link.seconds(num_bytes), default=Link())

    def links_among(self, devices: Collection[int]) -> list[Link]:
        """Every link that joins two of some different devices, found without looking at each pair:
        how many pairs meet in a group is how many there are in it, less those that meet further
        in."""
        members: dict[int, list[int]] = {}
        for device in sorted(devices):
            for group in (_WHOLE, *self.paths[device]):
                members.setdefault(group, []).append(device)
        pairs = {group: comb(len(own), 2) for group, own in members.items()}
        meeting = dict(pairs)
        for group, count in pairs.items():
            if group != _WHOLE:
                meeting[self._parents[group]] -= count
        everybody, links = set(devices), []
        for (first, second), link in self.wires.items():
            if first in everybody and second in everybody:
                meeting[self._common(first, second)] -= 1
                links.append(link)
        for group, count in meeting.items():
            if count:
                links += self._meeting_links(group, members[group])
        return links

    def _meeting_links(self, group: int, meeting: Sequence[int]) -> Iterator[Link]:
        """The links of pairs of devices that meet in a group, without looking at each pair: once
        for any two kinds of cards."""
        link = self._link_of(group)
        numbers = {self.cards[k] for k in meeting}
        if len({self.hosts[k] for k in meeting}) < 2 or numbers == {-1}:
            yield link
            return
        kinds = Counter(self.card(number) if number >= 0 else None for number in numbers)
        for ends in combinations_with_replacement(kinds, 2):
            if ends[0] != ends[1] or None in ends or kinds[ends[0]] > 1:
                yield _through(link, ends)

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


def _through(link: Link, cards: Iterable[Card | None]) -> Link:
    """A link whose ends are cards."""
    there = [card for card in cards if card is not None]
    if not there:
        return link
    rates = [card.bytes_per_second for card in there]
    rates += [link.bytes_per_second] if link.bytes_per_second else []
    latency = link.latency_seconds + sum(card.latency_seconds for card in there)
    return Link(latency_seconds=latency, bytes_per_second=min(rates, default=0.0))


def only(cluster: Cluster, chosen: Collection[int]) -> Cluster:
    """A cluster with some devices of another, by their indices, in its order. Groups that have none
    of them are left out."""
    wanted = set(chosen)
    devices = tuple(device for index, device in enumerate(cluster.devices) if index in wanted)
    names = {device.name for device in devices}
    members = {group.name: set(group.members) for group in cluster.groups}
    while True:
        there = names | members.keys()
        kept = {name: names & there for name, names in members.items() if names & there}
        if kept == members:
            break
        members = kept
    groups = tuple(
        group
        if len(group.members) == len(members[group.name])
        else replace(group, members=tuple(m for m in group.members if m in members[group.name]))
        for group in cluster.groups
        if group.name in members
    )
    wires = tuple(wire for wire in cluster.wires if set(wire.between) <= names)
    return replace(cluster, devices=devices, groups=groups, wires=wires)
