"""``Partition``: which layers on which devices; and what it costs, with the links that the
cluster's tree of devices gives it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from math import lcm

from penstock.base.errors import InputError
from penstock.core.cluster import Cluster, Link, Topology
from penstock.core.graph import LayerGraph
from penstock.planning.partition.chain import PAPER, CostModel, ExchangeLine
from penstock.planning.partition.layers import handed_on

_USUAL_BYTES = 2**20
"""Links are compared by how long they take for so much."""

MANY_PAIRS = 256
"""Of devices that meet, beyond which whoever may meet counts."""

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


@dataclass(frozen=True)
class PartitionedStage:
    """One stage of a partition.

    Attributes:
        layers: names, in execution order.
        devices: indices into the cluster's devices, one for each replica. Microbatch k is on the
            replica k modulo their number.
    """

    layers: tuple[str, ...]
    devices: tuple[int, ...]

    @property
    def replicas(self) -> int:
        """How many devices share the stage's microbatches."""
        return len(self.devices)


@dataclass(frozen=True)
class Partition:
    """Stages from the model's input to its output.

    Attributes:
        stages: every layer is in exactly one; no device is in two. Devices may be left over.
        bottleneck_seconds: the slowest stage or cut, per microbatch.
        method: what was searched, in words.
    """

    stages: tuple[PartitionedStage, ...]
    bottleneck_seconds: float
    method: str = ""

    @property
    def replicas(self) -> tuple[int, ...]:
        """How many devices each stage has."""
        return tuple(stage.replicas for stage in self.stages)


def evaluate(
    graph: LayerGraph,
    cluster: Cluster,
    cost_model: CostModel,
    partition: Partition,
    updates: float = 1.0,
) -> float:
    """Seconds per microbatch of the slowest stage or cut of any partition, in the steady state.

    Replicas run at the pace of the slowest of their devices. A cut takes the slowest of the links
    that are used: of replica k mod r to replica k mod r' for all microbatches k. Gradients go in
    one ring over the slowest link, or level by level through the cluster's tree, whichever is
    faster.

    Args:
        cluster: whose devices the partition names.
        cost_model: what stages and cuts cost.
        partition: ``bottleneck_seconds`` is not looked at.
        updates: per microbatch, as in ``CostModel.shared_seconds``.

    Raises:
        InputError: a layer is missing or there twice, a stage reads from a later one, or a device
            is not there or in two stages.
    """
    _check(graph, cluster, partition)
    topology = Topology(cluster)
    layers = {layer.name: layer for layer in graph.layers}
    beats = []
    for stage in partition.stages:
        stage_layers = [layers[name] for name in stage.layers]
        pace = min(cluster.devices[index].speed for index in stage.devices)
        exchange = exchange_seconds(
            exchange_lines(cost_model, topology, stage.devices),
            float(sum(layer.summed_bytes for layer in stage_layers)),
        )
        compute = sum(layer.compute_seconds for layer in stage_layers) / pace
        beats.append(cost_model.shared_seconds(compute, exchange, stage.replicas, updates))
    for (stage, following), num_bytes in zip(
        pairwise(partition.stages), _cuts(graph, partition), strict=True
    ):
        fewer = min(stage.replicas, following.replicas)
        link = _link_between(topology, stage.devices, following.devices)
        beats.append(cost_model.cut_seconds(num_bytes, fewer, link))
    return max(beats)


def exchange_lines(
    cost_model: CostModel, topology: Topology, devices: Sequence[int]
) -> tuple[ExchangeLine, ...]:
    """The ways in which devices can sum their gradients, each as a line over parameter bytes."""
    whole = cost_model.reduce_line(len(devices), topology.slowest_link(devices))
    levels = _levels(topology, devices)
    if len(levels) < 2:
        return (whole,)
    lines = [cost_model.reduce_line(count, link) for count, link in levels]
    # The paper lets the levels of its recursion overlap.
    combine = max if cost_model.name == PAPER else sum
    return whole, (combine(slope for slope, _ in lines), combine(base for _, base in lines))


def exchange_seconds(lines: Sequence[ExchangeLine], parameter_bytes: float) -> float:
    """The fastest of several ways to exchange gradients."""
    return min(slope * parameter_bytes + base for slope, base in lines)


def _levels(topology: Topology, devices: Sequence[int]) -> list[tuple[int, Link]]:
    """(members, link) of each level at which devices are joined, innermost first; nothing where a
    pair has a wire of its own or groups are not equally deep."""
    depths = {len(topology.paths[index]) for index in devices}
    if topology.wires or len(depths) > 1:
        return []
    levels = []
    for depth in range(depths.pop(), -1, -1):
        members = members_at(topology, depth, devices)
        links = [link_within(topology, path) for path, inner in members.items() if len(inner) > 1]
        if links:
            levels.append((max(map(len, members.values())), max(links, key=usual_seconds)))
    return levels


def _link_between(topology: Topology, senders: Sequence[int], readers: Sequence[int]) -> Link:
    """The slowest link that microbatches take from the replicas of one stage to the next."""
    return max(links_in_turns(topology, senders, readers), key=usual_seconds)


def links_in_turns(
    topology: Topology, senders: Sequence[int], readers: Sequence[int]
) -> dict[Link, None]:
    """The different links over which microbatches go that take turns on the replicas of two stages;
    where very many pairs of these meet, all links among them."""
    count = lcm(len(senders), len(readers))
    if count > MANY_PAIRS:
        return dict.fromkeys(topology.links_among({*senders, *readers}))
    pairs = islice(zip(cycle(senders), cycle(readers), strict=False), count)
    return dict.fromkeys(topology.link(*pair) for pair in pairs if len({*pair}) > 1)


def _cuts(graph: LayerGraph, partition: Partition) -> list[float]:
    """Bytes in one direction over each border between stages."""
    names = [layer.name for layer in graph.layers]
    stage_of = {name: k for k, stage in enumerate(partition.stages) for name in stage.layers}
    totals = [0.0] * (len(partition.stages) - 1)
    for source, readers, num_bytes in handed_on(graph):
        last = max(stage_of[names[reader]] for reader in readers)
        for border in range(stage_of[names[source]], last):
            totals[border] += num_bytes
    return totals


def _check(graph: LayerGraph, cluster: Cluster, partition: Partition) -> None:
    stage_of: dict[str, int] = {}
    for index, stage in enumerate(partition.stages):
        for name in stage.layers:
            if name in stage_of:
                raise InputError(f"layer {name!r} is in stages {stage_of[name]} and {index}")
            stage_of[name] = index
        if not stage.layers or not stage.devices:
            raise InputError(f"stage {index} needs at least one layer and one device")
    if set(stage_of) != {layer.name for layer in graph.layers}:
        raise InputError("a partition has each layer of its graph, and no others")
    names = [layer.name for layer in graph.layers]
    for source, readers, _ in handed_on(graph):
        for reader in readers:
            if stage_of[names[reader]] < stage_of[names[source]]:
                raise InputError(
                    f"layer {names[reader]!r} is in a stage before {names[source]!r}, but reads it"
                )
    used = [index for stage in partition.stages for index in stage.devices]
    if len(set(used)) < len(used) or not set(used) <= set(range(len(cluster.devices))):
        raise InputError(
            f"devices are {used}, but each may be used once, and the cluster has "
            f"{len(cluster.devices)}"
        )
