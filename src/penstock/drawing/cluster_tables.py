"""A cluster as tables of text: its devices, how they are joined, and where stages may wait. The
terminal and a notebook show the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from penstock.base.units import format_bytes_per_second, picture_bytes, picture_seconds
from penstock.core.cluster import Cluster, Device, Link

_NONE = "–"
_MOST_ALIKE = 8
"""More devices than these that are alike and stand together share a row."""


class TextTable(NamedTuple):
    """The names of the columns, of which all but the first are numbers, and a text per cell."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def cluster_tables(cluster: Cluster) -> Iterator[TextTable]:
    """All that a cluster's file says."""
    yield TextTable(("device", "memory", "speed"), list(_devices(cluster.devices)))
    joined = ("joined", "latency", "bandwidth", "shared memory")
    yield TextTable(joined, list(_joined(cluster)))
    if cluster.tiers:
        tiers = [
            (str(tier), rate(tier.read_bytes_per_second), rate(tier.write_bytes_per_second))
            for tier in cluster.tiers
        ]
        yield TextTable(("stages come from", "read", "written"), tiers)


def _devices(devices: Sequence[Device]) -> Iterator[tuple[str, ...]]:
    alike = groupby(devices, lambda device: (device.memory_bytes, device.speed))
    for (memory_bytes, speed), same in alike:
        names = [device.name for device in same]
        if len(names) > _MOST_ALIKE:
            names = [f"{names[0]} … {names[-1]} ({len(names)})"]
        for name in names:
            yield name, _memory(memory_bytes), f"{speed:g}"


def _joined(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    for group in cluster.groups:
        members = f"{group.name}: {', '.join(group.members)}"
        yield members, *link_cells(group.link), _memory(group.memory_bytes)
    whole = "between groups" if cluster.groups else "all"
    yield whole, *link_cells(cluster.link), _memory(cluster.memory_bytes)
    for wire in cluster.wires:
        yield " – ".join(wire.between), *link_cells(wire.link), _NONE
    for spare in cluster.spares:
        bandwidth = format_bytes_per_second(spare.bytes_per_second)
        yield f"spare {spare.name}", _NONE, bandwidth, _NONE


def _memory(num_bytes: int) -> str:
    return picture_bytes(num_bytes) if num_bytes else _NONE


def rate(bytes_per_second: float) -> str:
    """A bandwidth; 0 stands for one that nobody waits for."""
    return format_bytes_per_second(bytes_per_second) if bytes_per_second else "free"


def link_cells(link: Link) -> tuple[str, str]:
    """Latency and bandwidth."""
    return picture_seconds(link.latency_seconds), rate(link.bytes_per_second)
