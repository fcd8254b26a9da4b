"""The best partition of a model on a cluster under a cost model: ``best_partition``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Literal

from penstock.base.errors import InputError, PlanError
from penstock.base.values import is_whole, one_of
from penstock.core.cluster import Cluster, Topology
from penstock.core.graph import LayerGraph
from penstock.planning.partition.cost_models import CostModel, check_updates
from penstock.planning.partition.steady.evaluation import Partition, PartitionedStage, evaluate
from penstock.planning.partition.steady.flat import FlatTask, search_flat
from penstock.planning.partition.steady.in_order import OrderTask, search_in_order
from penstock.planning.partition.steady.level_programme import MOST_STEPS, steps
from penstock.planning.partition.steady.levels import levels_of, nested_partition
from penstock.planning.partition.steady.pieces import Fits, Piece, all_fit
from penstock.planning.partition.steady.states import MOST_STATES, all_states, prefixes

_MOST_DEVICES = 64
"""Where links differ, all ranges of more devices are too many to try."""

LayerOrder = Literal["execution", "any"]


def best_partition(
    graph: LayerGraph,
    cluster: Cluster,
    cost_model: CostModel,
    *,
    updates: float = 1.0,
    straight: bool = False,
    order: LayerOrder = "execution",
    fits: Fits | None = None,
    num_devices: int | None = None,
) -> Partition:
    """Stages, replicas and devices with the least steady-state seconds per microbatch.

    Exact on clusters with one link and one speed: over all cuts of the execution order, or with
    ``order="any"`` over all cuts of the graph, all counts of replicas, and all that ``fits``. On
    others it is the best of those that take devices in the cluster's order, so that a stage is
    on neighbours and may cross servers, scored with the links that they use; speeds may be mixed.
    Up to 64 devices, or any number for straight pipelines: beyond that, every link counts as the
    slowest. On regular trees what PipeDream's programme finds level by level
    (``steady.levels``) competes too, scored in the same way, where all devices may be used and
    the programme does not take seconds. ``method`` of the result says what was searched.

    Devices may be left over. Parameters that several layers share count in each.

    Args:
        cost_model: what stages and cuts cost.
        updates: per microbatch, as in ``CostModel.shared_seconds``; 1/m for synchronous training
            with m microbatches.
        straight: whether every stage has one device.
        order: ``"any"`` also cuts where no prefix of the execution order ends. A graph with more
            than ``states.MOST_STATES`` places to cut is cut in execution order even so; ``method``
            of the result says it.
        fits: may a stage have these layers (by index), so many replicas, and so many microbatches
            in flight on each of them? These are 1 + ⌈devices behind it / its replicas⌉, as in
            PipeDream; for straight pipelines, the number of stages from it to the end. What fits
            with some microbatches in flight must fit with fewer.
        num_devices: use at most so many, the first in the cluster; all by default.

    Raises:
        InputError: an argument has no meaning.
        PlanError: nothing fits.
    """
    count = _check(cluster, updates, order, num_devices)
    topology = Topology(cluster)
    link = topology.slowest_link(range(count))
    speeds = [device.speed for device in cluster.devices[:count]]
    states = all_states(graph, limited=fits is not None) if order == "any" else None
    method = "all cuts of the graph" if states else "cuts of the execution order"
    if order == "any" and not states:
        method += f", since the graph has more than {MOST_STATES} places to cut"
    task = FlatTask(
        states=states or prefixes(graph),
        cost_model=cost_model,
        link=link,
        num_devices=count,
        updates=updates,
        most_replicas=1 if straight else count,
        speed=min(speeds),
        fits=fits,
    )
    flat = search_flat(task)
    if flat is None:
        raise PlanError(
            f"no partition on {count} devices fits: a stage breaks its limit however layers are "
            "cut; raise the limits, use more devices or recompute"
        )
    best = _partition(task, cluster, 0, flat.pieces, method)
    if _is_uniform(topology, count):
        return best
    best = _with_true_links(task, topology, best)
    nested = _level_by_level(task, cluster)
    return min((best, *nested), key=lambda made: made.bottleneck_seconds)


def _level_by_level(task: FlatTask, cluster: Cluster) -> list[Partition]:
    """What PipeDream's programme finds, if it has something to say here and that fits."""
    levels = levels_of(cluster)
    if levels is None or task.most_replicas == 1 or task.num_devices < len(cluster.devices):
        return []
    graph = task.states.graph
    if steps(len(graph.layers) + 1, levels.counts, task.updates) > MOST_STEPS:
        return []
    made = nested_partition(graph, cluster, task.cost_model, updates=task.updates).partition
    place = {layer.name: index for index, layer in enumerate(graph.layers)}
    stages = [([place[name] for name in stage.layers], stage.replicas) for stage in made.stages]
    return [made] if task.fits is None or all_fit(task.fits, stages) else []


def _with_true_links(task: FlatTask, topology: Topology, best: Partition) -> Partition:
    """The best partition on a cluster with several links or speeds, given one that has none."""
    if task.num_devices > _MOST_DEVICES and task.most_replicas > 1:
        return replace(best, method=f"{best.method}, as if every link were the slowest")
    in_order = OrderTask(
        states=task.states,
        cost_model=task.cost_model,
        topology=topology,
        num_devices=task.num_devices,
        updates=task.updates,
        most_replicas=task.most_replicas,
        fits=task.fits,
    )
    faster = search_in_order(in_order, best.bottleneck_seconds)
    method = f"{best.method}, devices in order"
    if faster is None:
        return replace(best, method=method)
    made = _partition(task, topology.cluster, *faster, method)
    return min(made, best, key=lambda partition: partition.bottleneck_seconds)


def _is_uniform(topology: Topology, num_devices: int) -> bool:
    """Whether any two devices have the same link, and all are equally fast."""
    speeds = {device.speed for device in topology.cluster.devices[:num_devices]}
    return not topology.wires and len(speeds) == 1 and len(set(topology.paths[:num_devices])) == 1


def _check(cluster: Cluster, updates: float, order: str, num_devices: int | None) -> int:
    one_of("order", order, ("execution", "any"))
    check_updates(updates)
    there = len(cluster.devices)
    if num_devices is None:
        return there
    if not is_whole(num_devices) or not 1 <= num_devices <= there:
        raise InputError(f"num_devices is {num_devices!r}, but must be between 1 and {there}")
    return num_devices


def _partition(
    task: FlatTask, cluster: Cluster, first: int, pieces: Sequence[Piece], method: str
) -> Partition:
    names = [layer.name for layer in task.states.graph.layers]
    stages, device = [], first
    for piece in pieces:
        layers = task.states.between(piece.start, piece.stop)
        devices = tuple(range(device, device + piece.replicas))
        stages.append(PartitionedStage(tuple(names[index] for index in layers), devices))
        device += piece.replicas
    made = Partition(tuple(stages), inf, method)
    graph = task.states.graph
    seconds = evaluate(graph, cluster, task.cost_model, made, task.updates)
    return replace(made, bottleneck_seconds=seconds)
