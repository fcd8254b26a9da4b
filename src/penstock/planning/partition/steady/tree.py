"""A cluster's tree of devices, one depth at a time, and its links by how slow they are."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.core.cluster import Link, Topology

_USUAL_BYTES = 2**20
"""Links are compared by how long they take for so much."""

Path = tuple[int, ...]
"""The groups that something is in, outermost first, by their indices."""


def members_at(
    topology: Topology, depth: int, devices: Iterable[int]
) -> dict[Path, frozenset[int]]:
    """The members of each group that is ``depth`` deep in the cluster's tree.

    Args:
        topology: the cluster's; its groups are equally deep.
        depth: 0 for the cluster itself.
        devices: indices; what has none of them is left out.

    Returns:
        By a group's path: the indices of its groups, or of its devices where it is innermost.
    """
    members: dict[Path, set[int]] = {}
    for device in devices:
        path = topology.paths[device]
        inner = path[depth] if depth < len(path) else device
        members.setdefault(path[:depth], set()).add(inner)
    return {path: frozenset(inner) for path, inner in members.items()}


def link_within(topology: Topology, path: Path) -> Link:
    """The link between the members of a group, or of the cluster where the path is empty."""
    cluster = topology.cluster
    return cluster.groups[path[-1]].link if path else cluster.link


def usual_seconds(link: Link) -> float:
    """Seconds of a message of usual size, to compare links by."""
    return link.seconds(_USUAL_BYTES)
