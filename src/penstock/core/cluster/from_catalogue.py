"""Clusters of machines of the catalogue: its devices, the groups they are in, and their cards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from penstock.base.errors import InputError
from penstock.base.values import whole
from penstock.core.catalogue import (
    HostSpec,
    LinkSpec,
    device_named,
    host_named,
    hosts,
    names_a_host,
)
from penstock.core.cluster.parts import MOST_DEVICES, Card, Device, Group, Link

REACHED = 0.77
"""Share of a link's rate that transfers reach: sums over eight A100 move 230 of 300 GB/s
(VIA-Research/vTrain, its measured tables)."""


_COUNTED = re.compile(r"\s*(\d{1,9})\s*[x×*]\s*(\S.*)", re.IGNORECASE)


def host_of(name: str) -> tuple[HostSpec, str]:
    """A host by its name, or the usual one of a device; and what is assumed of it, if anything.

    Raises:
        InputError: there is none, or the catalogue knows no host of that device.
    """
    if names_a_host(name):
        return host_named(name), ""
    hardware = device_named(name, or_host=True)
    if hardware.host:
        return host_named(hardware.host), ""
    if not hardware.assumed_host:
        raise InputError(
            f"the catalogue has no host with {hardware.name}, and none of a device like it; write "
            "the cluster as a file (docs/clusters.md), or take one of its hosts: "
            f"{', '.join(hosts())}"
        )
    like = host_named(hardware.assumed_host)
    assumed = (
        f"the catalogue has no host with {hardware.name}: it is assumed to be one like {like.name} "
        f"({like.title}; `penstock devices {like.name}` has the figures); write the cluster as a "
        "file if you know better (docs/clusters.md)"
    )
    return replace(like, device=hardware.name), assumed


def fields_of(name: str, num_hosts: int | None, devices_per_host: int | None) -> dict[str, Any]:
    """The fields of a ``Cluster`` of equal hosts.

    Raises:
        InputError: as ``host_of``, or counts that cannot be.
    """
    counted = _COUNTED.fullmatch(name) if isinstance(name, str) else None
    host, assumed = host_of(counted[2] if counted else name)
    if counted:
        if num_hosts is not None or devices_per_host is not None:
            raise InputError(f"{name!r} says itself how many; leave hosts and devices_per_host out")
        num_hosts, devices_per_host = _shared_out(int(counted[1]), counted[2], host)
    num_hosts = whole(
        "hosts", 1 if num_hosts is None else num_hosts, 1, MOST_DEVICES // host.devices
    )
    used = host.devices
    if devices_per_host is not None:
        used = whole("devices_per_host", devices_per_host, 1, host.devices)
    hardware = device_named(host.device)
    devices: list[Device] = []
    groups: list[Group] = []
    for number in range(num_hosts):
        names = [f"host{number}:{index}" for index in range(used)]
        devices += [
            Device(
                name=device,
                memory_bytes=int(hardware.memory_bytes.value),
                kind=hardware.kind,
                allocator_slack=hardware.slack.value,
            )
            for device in names
        ]
        groups += _groups(host, f"host{number}", names)
    link = Link(
        bytes_per_second=REACHED * host.card.bytes_per_second.value,
        latency_seconds=host.card.latency_seconds.value,
    )
    return {
        "devices": tuple(devices),
        "groups": tuple(groups),
        "link": link,
        "hardware": hardware.name,
        "assumed": assumed,
    }


def _shared_out(count: int, name: str, host: HostSpec) -> tuple[int, int]:
    """Hosts, and devices of each, of so many hosts; or, if a device was named, of so many devices
    on as few hosts as have them."""
    if names_a_host(name):
        return count, host.devices
    whole(f"the number of {name}", count, 1, MOST_DEVICES)
    if count > host.devices and count % host.devices:
        fewer = count - count % host.devices
        raise InputError(
            f"a host has {host.devices} of {host.device}, so {count} do not fill hosts; take "
            f"{fewer} or {fewer + host.devices}, or fewer of each with "
            f"Cluster.of({host.device!r}, hosts=…, devices_per_host=…)"
        )
    return max(1, count // host.devices), min(count, host.devices)


def _groups(host: HostSpec, name: str, devices: Sequence[str]) -> Iterator[Group]:
    """The groups of one host, innermost first: devices on a card, on a switch, and all."""
    members = list(devices)
    link = None if host.link is None else _link(host.link)
    kind = None if host.link is None else host.link.kind
    shared = host.card.devices_per_card
    card = Card(bytes_per_second=REACHED * host.card.bytes_per_second.value)
    if shared < host.devices:
        cards = [
            Group(
                name=f"{name}-card{index}", members=part, link=link or Link(), card=card, kind=kind
            )
            for index, part in enumerate(_parts(members, shared))
        ]
        yield from cards
        members = [group.name for group in cards]
    size = max(1, host.switch * len(members) // host.devices)
    if host.switch and len(members) > size:
        switches = [
            Group(name=f"{name}-switch{index}", members=part, link=link or Link(), kind="pcie")
            for index, part in enumerate(_parts(members, size))
        ]
        yield from switches
        members = [group.name for group in switches]
        link = _link(host.across) if host.across is not None else link
    if len(members) > 1 or host.card.devices_per_card >= host.devices:
        whole_card = card if host.card.devices_per_card >= host.devices else None
        yield Group(
            name=name, members=tuple(members), link=link or Link(), card=whole_card, kind=kind
        )


def _link(spec: LinkSpec) -> Link:
    return Link(
        bytes_per_second=REACHED * spec.bytes_per_second.value,
        latency_seconds=spec.latency_seconds.value,
    )


def _parts(members: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    for first in range(0, len(members), size):
        yield tuple(members[first : first + size])
