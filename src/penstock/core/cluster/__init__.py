"""Where a model can be spread: devices, how they are joined, and files that say so.

A cluster is a list of devices, and a tree that says how they are joined: groups of devices (a
server), groups of groups (a rack). Two devices talk over the link of the smallest group that has
both, unless a wire of their own is named.
"""

from __future__ import annotations

from penstock.core.cluster.cluster import Cluster, Topology
from penstock.core.cluster.parts import Card, Device, Group, Link, SpareMachine, Tier, Wire

__all__ = ["Card", "Cluster", "Device", "Group", "Link", "SpareMachine", "Tier", "Topology", "Wire"]
