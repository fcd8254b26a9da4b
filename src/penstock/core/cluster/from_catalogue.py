"""Clusters of machines of the catalogue: its devices, the groups they are in, and their cards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

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


def host_of(name: str) -> HostSpec:
    """A host by its name, or the usual one of a device.

    Raises:
        InputError: there is none, or the catalogue knows no host of that device.
    """
    if names_a_host(name):
        return host_named(name)
    hardware = device_named(name, or_host=True)
    if not hardware.host:
        raise InputError(
            f"the catalogue has no host with {hardware.name}; write the cluster as a file "
            f"(docs/clusters.md), or take one of its hosts: {', '.join(hosts())}"
        )
    return host_named(hardware.host)


def fields_of(name: str, num_hosts: int, devices_per_host: int | None) -> dict[str, Any]:
    """The fields of a ``Cluster`` of equal hosts.

    Raises:
        InputError: as ``host_of``, or counts that cannot be.
    """
    host = host_of(name)
    whole("hosts", num_hosts, 1, MOST_DEVICES // host.devices)
    used = host.devices
    if devices_per_host is not None:
        used = whole("devices_per_host", devices_per_host, 1, host.devices)
    hardware = device_named(host.device)
    devices: list[Device] = []
    groups: list[Group] = []
    for number in range(num_hosts):
        names = [f"host{number}:{index}" for index in range(used)]
        devices += [
            Device(name=device, memory_bytes=int(hardware.memory_bytes.value), kind=hardware.kind)
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
    }


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
