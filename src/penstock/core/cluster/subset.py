"""Some devices of a cluster, joined as they are in the whole."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from penstock.core.cluster import Cluster


def only(cluster: Cluster, chosen: Collection[int]) -> Cluster:
    """A cluster with some devices of another, by their indices, in its order. Groups that have none
    of them are left out."""
    devices = tuple(device for index, device in enumerate(cluster.devices) if index in set(chosen))
    names = {device.name for device in devices}
    members = {group.name: set(group.members) for group in cluster.groups}
    while True:
        there = names | members.keys()
        kept = {name: names & there for name, names in members.items() if names & there}
        if kept == members:
            break
        members = kept
    groups = tuple(
        replace(group, members=tuple(name for name in group.members if name in members[group.name]))
        for group in cluster.groups
        if group.name in members
    )
    wires = tuple(wire for wire in cluster.wires if set(wire.between) <= names)
    return replace(cluster, devices=devices, groups=groups, wires=wires)
