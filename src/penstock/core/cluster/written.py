"""Clusters as people write them: TOML with servers, units and matrices (``docs/clusters.md``).

Everything here becomes the plain parts of a ``Cluster``; nothing reads it again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations
from typing import Any

import msgspec

from penstock.base.errors import InputError
from penstock.base.units import is_time, to_bytes, to_bytes_per_second, to_seconds
from penstock.base.values import check_toml, whole
from penstock.core.cluster.parts import (
    MOST_DEVICES,
    Card,
    Device,
    DeviceKind,
    Group,
    GroupKind,
    Link,
    SpareMachine,
    Tier,
    TierKind,
    Wire,
)

_MOST_DEPTH = 100


class Bytes(int):
    """A number, or text with a unit."""


class Rate(float):
    """Bytes per second: a number, or text with a unit."""


class Seconds(float):
    """A number, or text with a unit."""


class Joint:
    """A link: a bandwidth, ``"10Gbit/s, 50us"``, or a table."""

    def __init__(self, link: Link) -> None:
        self.link = link


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class WrittenLink(_Table, frozen=True):
    """``{ bandwidth = "10Gbit/s", latency = "50us" }``."""

    bandwidth: Rate = Rate(0)
    latency: Seconds = Seconds(0)


_NO_LINK = Joint(Link())


class WrittenCard:
    """A card that several devices share, written as a link is."""

    def __init__(self, card: Card) -> None:
        self.card = card


class WrittenDevice(_Table, frozen=True):
    """A device that is in no server."""

    name: str
    memory: Bytes = Bytes(0)
    speed: float = 1.0
    kind: DeviceKind | None = None
    price_per_hour: float = 0.0
    allocator_slack: float = 0.0


class WrittenServer(_Table, frozen=True):
    """Servers that are all alike."""

    name: str = ""
    count: int = 1
    devices: int = 1
    memory: Bytes = Bytes(0)
    shared_memory: Bytes = Bytes(0)
    speed: float = 1.0
    kind: DeviceKind | None = None
    price_per_hour: float = 0.0
    allocator_slack: float = 0.0
    link: Joint = _NO_LINK
    link_kind: GroupKind | None = None
    card: WrittenCard | None = None

    def __post_init__(self) -> None:
        for name in ("count", "devices"):
            whole(name, getattr(self, name), 1, MOST_DEVICES)
        if self.devices == 1 and self.link is not _NO_LINK:
            raise InputError(
                "a server's link is between its devices, but it has one; set devices, or give the "
                "link between servers at the top of the file"
            )

    def parts(self, number: int) -> Iterator[tuple[tuple[Device, ...], Group | None]]:
        """(devices, group) of each server; a single device is its own server.

        Args:
            number: of servers that came before.
        """
        for index in range(self.count):
            if not self.name:
                name = f"server{number + index}"
            else:
                name = f"{self.name}{index}" if self.count > 1 else self.name
            yield self._one(name)

    def _one(self, name: str) -> tuple[tuple[Device, ...], Group | None]:
        if self.devices == 1:
            limits = [limit for limit in (self.memory, self.shared_memory) if limit]
            memory_bytes = int(min(limits, default=0))
            device = self._device(name, memory_bytes)
            if self.card is None:
                return (device,), None
            return (device,), Group(name=f"{name}:host", members=(name,), card=self.card.card)
        members = tuple(f"{name}:{index}" for index in range(self.devices))
        devices = tuple(self._device(member, int(self.memory)) for member in members)
        shared = int(self.shared_memory)
        return devices, Group(
            name=name,
            members=members,
            link=self.link.link,
            memory_bytes=shared,
            card=None if self.card is None else self.card.card,
            kind=self.link_kind,
        )

    def _device(self, name: str, memory_bytes: int) -> Device:
        return Device(
            name=name,
            memory_bytes=memory_bytes,
            speed=self.speed,
            kind=self.kind,
            price_per_hour=self.price_per_hour,
            allocator_slack=self.allocator_slack,
        )


class WrittenGroup(_Table, frozen=True):
    """Servers, devices or other groups that are near to each other, as in a rack."""

    name: str
    members: tuple[str, ...]
    link: Joint = _NO_LINK
    shared_memory: Bytes = Bytes(0)
    link_kind: GroupKind | None = None
    card: WrittenCard | None = None

    @property
    def group(self) -> Group:
        """The same with plain numbers."""
        return Group(
            name=self.name,
            members=self.members,
            link=self.link.link,
            memory_bytes=int(self.shared_memory),
            card=None if self.card is None else self.card.card,
            kind=self.link_kind,
        )


class WrittenWire(_Table, frozen=True):
    """A link of two devices' own."""

    between: tuple[str, str]
    link: Joint


class WrittenSpare(_Table, frozen=True):
    """Machines that can sum gradients."""

    bandwidth: Rate
    name: str = "spare"
    count: int = 1
    address: str = ""

    def __post_init__(self) -> None:
        whole("count", self.count, 1, MOST_DEVICES)
        if self.address and self.count > 1:
            raise InputError(
                f"{self.count} spare machines cannot have the address {self.address!r}; write a "
                "[[spares]] for each"
            )

    def parts(self) -> Iterator[SpareMachine]:
        """Each of them."""
        for index in range(self.count):
            name = f"{self.name}{index}" if self.count > 1 else self.name
            rate = float(self.bandwidth)
            yield SpareMachine(name=name, bytes_per_second=rate, address=self.address)


class WrittenTier(_Table, frozen=True):
    """Where ranks may keep stages that are not in memory."""

    kind: TierKind = "disk"
    folder: str = ""
    read: Rate = Rate(0)
    write: Rate = Rate(0)

    @property
    def tier(self) -> Tier:
        """The same with plain numbers."""
        return Tier(
            kind=self.kind,
            folder=self.folder,
            read_bytes_per_second=float(self.read),
            write_bytes_per_second=float(self.write),
        )


class WrittenMatrix(_Table, frozen=True):
    """Bandwidth, and perhaps latency, of every pair, as measuring programs print them."""

    bandwidth: tuple[tuple[float | str, ...], ...]
    latency: tuple[tuple[float | str, ...], ...] | float | str = 0.0
    bandwidth_unit: str = "B/s"
    latency_unit: str = "s"
    between: tuple[str, ...] = ()

    def wires(self, names: Sequence[str]) -> Iterator[Wire]:
        """A wire per pair: of the two directions, the slower one.

        Args:
            names: of all devices, which it is about unless it says ``between``.
        """
        names = self.between or names
        rates = _square("bandwidth", self.bandwidth, names)
        latency = self.latency
        if not isinstance(latency, tuple):
            latency = ((latency,) * len(names),) * len(names)
        times = _square("latency", latency, names)
        for row, column in combinations(range(len(names)), 2):
            places = ((row, column), (column, row))
            rate = min(self._rate(rates[a][b], names[a], names[b]) for a, b in places)
            seconds = max(to_seconds(_with_unit(times[a][b], self.latency_unit)) for a, b in places)
            link = Link(latency_seconds=seconds, bytes_per_second=rate)
            yield Wire(between=(names[row], names[column]), link=link)

    def _rate(self, cell: float | str, source: str, target: str) -> float:
        rate = to_bytes_per_second(_with_unit(cell, self.bandwidth_unit))
        if not rate > 0:
            raise InputError(f"matrix: the bandwidth from {source!r} to {target!r} is {cell!r}")
        return rate


class WrittenCluster(_Table, frozen=True):
    """The whole file."""

    link: Joint = _NO_LINK
    shared_memory: Bytes = Bytes(0)
    servers: tuple[WrittenServer, ...] = ()
    devices: tuple[WrittenDevice, ...] = ()
    groups: tuple[WrittenGroup, ...] = ()
    wires: tuple[WrittenWire, ...] = ()
    matrix: WrittenMatrix | None = None
    spares: tuple[WrittenSpare, ...] = ()
    tiers: tuple[WrittenTier, ...] = ()


def read(text: str) -> dict[str, Any]:
    """The fields of a ``Cluster``.

    Raises:
        msgspec.DecodeError: no TOML, an unknown key or a wrong type.
        InputError: parts that cannot be.
    """
    _check_depth(text)
    check_toml(text)
    written_cluster = msgspec.toml.decode(text, type=WrittenCluster, dec_hook=_convert)
    in_servers = sum(server.count * server.devices for server in written_cluster.servers)
    whole("the number of devices", in_servers + len(written_cluster.devices), 0, MOST_DEVICES)
    spares = sum(spare.count for spare in written_cluster.spares)
    whole("the number of spare machines", spares, 0, MOST_DEVICES)
    devices: list[Device] = []
    groups: list[Group] = []
    num_servers = 0
    for server in written_cluster.servers:
        for members, group in server.parts(num_servers):
            devices += members
            groups += [group] if group is not None else []
        num_servers += server.count
    devices += [
        Device(
            name=device.name,
            memory_bytes=int(device.memory),
            speed=device.speed,
            kind=device.kind,
            price_per_hour=device.price_per_hour,
            allocator_slack=device.allocator_slack,
        )
        for device in written_cluster.devices
    ]
    groups += [written.group for written in written_cluster.groups]
    wires = [Wire(between=wire.between, link=wire.link.link) for wire in written_cluster.wires]
    if written_cluster.matrix is not None:
        wires += written_cluster.matrix.wires([device.name for device in devices])
    return {
        "devices": tuple(devices),
        "link": written_cluster.link.link,
        "memory_bytes": int(written_cluster.shared_memory),
        "groups": tuple(groups),
        "wires": tuple(wires),
        "tiers": tuple(written.tier for written in written_cluster.tiers),
        "spares": tuple(spare for written in written_cluster.spares for spare in written.parts()),
    }


def _check_depth(text: str) -> None:
    """Raise ``InputError`` for brackets in brackets in brackets: the time that reading them takes
    grows with the square of their number."""
    depth = max(accumulate((sign in "[{") - (sign in "]}") for sign in text), default=0)
    if depth > _MOST_DEPTH:
        raise InputError(f"it has {depth:,} brackets in each other; write it flat")


def _convert(kind: type, value: object) -> object:
    """Msgspec asks here about types that are not its own, and adds the path to errors."""
    if kind is Bytes:
        return Bytes(to_bytes(value))
    if kind is Rate:
        return Rate(to_bytes_per_second(value))
    if kind is Seconds:
        return Seconds(to_seconds(value))
    link = _link(value)
    if kind is WrittenCard:
        if not link.bytes_per_second:
            raise InputError(f"{value!r} is no card; give its bandwidth, as in 10Gbit/s, 20us")
        return WrittenCard(Card.of(link))
    return Joint(link)


def _link(value: object) -> Link:
    if isinstance(value, dict):
        table = msgspec.convert(value, WrittenLink, dec_hook=_convert)
        return Link(latency_seconds=float(table.latency), bytes_per_second=float(table.bandwidth))
    if not isinstance(value, str):
        return Link(bytes_per_second=to_bytes_per_second(value))
    parts = value.split(",")
    times = [part for part in parts if is_time(part)]
    rates = [part for part in parts if not is_time(part)]
    if len(times) > 1 or len(rates) > 1:
        raise InputError(f"{value!r} is not a link; write for example 10Gbit/s, 50us")
    return Link(
        latency_seconds=to_seconds(times[0]) if times else 0.0,
        bytes_per_second=to_bytes_per_second(rates[0]) if rates else 0.0,
    )


def _square(
    subject: str, rows: Sequence[Sequence[float | str]], names: Sequence[str]
) -> Sequence[Sequence[float | str]]:
    size = len(names)
    if len(rows) != size or any(len(row) != size for row in rows):
        raise InputError(
            f"matrix: {subject} has {len(rows)} rows of "
            f"{', '.join({str(len(row)) for row in rows})} numbers; "
            f"write {size} rows of {size}, for {', '.join(names[:6])}"
        )
    return rows


def _with_unit(cell: float | str, unit: str) -> str | float:
    return cell if isinstance(cell, str) else f"{cell!r}{unit}"
