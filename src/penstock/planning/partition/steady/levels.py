"""PipeDream's own dynamic programme, level by level of a regular tree of devices.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section
3.1. Level k joins m_k groups of level k−1 over links of bandwidth B_k; a device is a group of level
0. A *component* is a range of layers on one such group. With T_l seconds for layer l:

- A⁰(i→j) = Σ T_l, and m_0 = 1
- T^k(i→j, m): a component of layers i to j, planned as A^{k−1}(i→j, m_{k−1}), on each of m groups
- A^k(i→j, m) = min{T^k(i→j, m), min_{s,m'} max{A^k(i→s, m−m'), cut behind s, T^k(s+1→j, m')}}

What T^k and a cut take is up to the cost model: ``CostModel.shared_seconds``, with a component's
seconds in the place of compute, and ``CostModel.cut_seconds``. ``pipedream-released`` has a quirk:
where a component is the first of its pipeline, the published optimizer divides its exchange of
gradients by the devices of a group, as if they shared the work.

Plans are nested: a pipeline inside each server may be replicated as a whole, or servers may be
stages, but no stage takes part of one server and part of another. ``best_partition`` looks at these
plans too. Cuts are behind prefixes of the execution order. Groups may be left over at any level;
the original uses all of them. Both sides of a cut are charged for it, so that the side with fewer
replicas counts; the original forgets a pipeline's first component.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, prod

from penstock.base.errors import InputError
from penstock.core.cluster import Cluster, Topology
from penstock.core.graph import LayerGraph
from penstock.planning.partition.cost_models import CostModel, check_updates
from penstock.planning.partition.steady.evaluation import Partition, PartitionedStage, evaluate
from penstock.planning.partition.steady.level_programme import (
    Component,
    Levels,
    Programme,
    worth_cutting,
)
from penstock.planning.partition.steady.tree import link_within, members_at


@dataclass(frozen=True)
class NestedPartition:
    """The partition that the programme over the levels of a cluster found.

    Attributes:
        components: those of the outermost level, from the model's input to its output.
        objective_seconds: A^L of the whole model, the programme's own value. It takes the exchange
            of a replicated component as one that all its parameters make together, once for each
            microbatch that a group gets.
        partition: the same as stages. A component on m groups gives each of its inner stages m
            times the replicas; microbatch k is on the group k modulo m. Its ``bottleneck_seconds``
            are those of ``evaluate``: every stage exchanges its own gradients, and less often if it
            has replicas inside too. With ``ring`` that is never more than the objective. With the
            other two it may be: of the published optimizer's because of its quirk, of the paper's
            because cuts are shared by replicas inside a component only. To compare nested plans
            with others, compare these.
    """

    components: tuple[Component, ...]
    objective_seconds: float
    partition: Partition


def levels_of(cluster: Cluster) -> Levels | None:
    """The levels of a cluster, or ``None`` where it is no regular tree.

    Args:
        cluster: regular if no pair has a wire of its own, devices are equally fast, and all groups
            of a level have as many members and the same link.
    """
    topology = Topology(cluster)
    paths = topology.paths
    if topology.wires or len({len(path) for path in paths}) > 1:
        return None
    if len({device.speed for device in cluster.devices}) > 1:
        return None
    counts, links = [], []
    for depth in range(len(paths[0]), -1, -1):
        members = members_at(topology, depth, range(len(paths)))
        sizes = {len(inner) for inner in members.values()}
        there = {link_within(topology, path) for path in members}
        if len(sizes) > 1 or len(there) > 1:
            return None
        counts.append(sizes.pop())
        links.append(there.pop())
    order = sorted(range(len(paths)), key=lambda index: (paths[index], index))
    return Levels(tuple(counts), tuple(links), tuple(order))


def nested_partition(
    graph: LayerGraph, cluster: Cluster, cost_model: CostModel, *, updates: float = 1.0
) -> NestedPartition:
    """The best nested plan, by PipeDream's programme.

    Args:
        graph: the model, cut in its execution order. Parameters that several layers share count in
            each.
        cluster: a regular tree.
        cost_model: what stages and cuts cost.
        updates: per microbatch, as in ``CostModel.shared_seconds``. A group that gets every m-th
            microbatch has m times as many per microbatch of its own.

    Raises:
        InputError: the cluster is no regular tree, or ``updates`` has no meaning.
    """
    levels = levels_of(cluster)
    if levels is None:
        raise InputError(
            "the level-by-level programme needs a regular tree: equally fast devices, groups of "
            "equal size and link at each level, and no wires; ask best_partition instead"
        )
    check_updates(updates)
    programme = Programme(worth_cutting(graph), levels, cost_model, updates)
    components, objective = programme.result()
    partition = _flat(graph, levels, components)
    seconds = evaluate(graph, cluster, cost_model, partition, updates)
    return NestedPartition(components, objective, replace(partition, bottleneck_seconds=seconds))


def _flat(graph: LayerGraph, levels: Levels, components: Sequence[Component]) -> Partition:
    """Nested components as stages with devices."""
    stages = tuple(
        PartitionedStage(
            tuple(layer.name for layer in graph.layers[component.start : component.stop]),
            tuple(levels.devices[place] for place in places),
        )
        for component, places in _placed(levels, len(levels.counts) - 1, components, [0])
    )
    return Partition(stages, inf, "PipeDream's programme, level by level")


def _placed(
    levels: Levels, level: int, components: Sequence[Component], groups: Sequence[int]
) -> Iterator[tuple[Component, list[int]]]:
    """(component, places) of every stage, where several groups of a level all do the same.

    Args:
        groups: the first place of each, in the order in which they get microbatches.
    """
    size, taken = prod(levels.counts[:level]), 0
    for component in components:
        # Which of the groups comes first: then a microbatch stays in its own from stage to stage.
        own = [group + (taken + k) * size for k in range(component.replicas) for group in groups]
        taken += component.replicas
        if level:
            yield from _placed(levels, level - 1, component.inner, own)
        else:
            yield component, own
