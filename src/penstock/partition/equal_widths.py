"""PipeDream-2BW's planner: every width and depth, with and without recomputation.

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, arXiv 2006.09503,
section 4. All stages have the same number of replicas, the *width* w; the *depth* d is the number
of stages. For repeated blocks, such as a transformer's, little else is worth a look, and there are
so few of these configurations that each is evaluated.

With minibatches of B rows in microbatches of b there are m(b) = B/(w·b) per replica. A microbatch
takes t = max_i max(T_i + ΣT_{j→i}, G_i / m(b)): what stage i computes and receives from its
neighbours j, or its exchange of gradients, spread over the microbatches of an update. The paper
takes a recomputing stage as 4/3 as slow; here its forward counts a second time, as it was measured,
which is the same where a backward takes two forwards.

Memory of a stage that has w_i bytes of weights, keeps a_i of activations and takes inputs of x_i:
double-buffered weights 2w_i + d·a_i + d·x_i, with recomputation 2w_i + a_i + d·x_i; GPipe with
recomputation w_i + a_i + m·x_i. Summed up over equal stages these are the paper's |W|/d, A_tot/d
and A_in. The hungriest stage counts. They leave out gradients, optimizer state and workspace, as in
the paper: what comes back is to be simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from penstock.cluster import Cluster, Link, Topology
from penstock.errors import InputError
from penstock.graph import Layer, LayerGraph
from penstock.partition.chain import balance
from penstock.partition.cost_models import CostModel, cost_model
from penstock.values import one_of

Weights = Literal["2bw", "gpipe"]


@dataclass(frozen=True)
class WidthDepth:
    """One configuration.

    Attributes:
        width: replicas of each stage.
        depth: stages.
        microbatch_size: rows.
        num_microbatches: of each replica, per minibatch.
        recompute: whether stages keep their inputs only.
        cuts: where stages begin and end, as ``balance`` gives them.
        pipe_seconds: t, of one microbatch in the steady state.
        minibatch_seconds: what configurations are ranked by: m·t, or (m+d−1)·t where the pipeline
            flushes (``gpipe``).
        memory_bytes: of the stage that needs most.
        over_bytes: by how much that is more than its device has; 0 or less where it fits.
    """

    width: int
    depth: int
    microbatch_size: int
    num_microbatches: int
    recompute: bool
    cuts: tuple[int, ...]
    pipe_seconds: float
    minibatch_seconds: float
    memory_bytes: float
    over_bytes: float

    @property
    def is_feasible(self) -> bool:
        """Whether every stage fits."""
        return self.over_bytes <= 0


@dataclass(frozen=True)
class _Task:
    cluster: Cluster
    topology: Topology
    minibatch_rows: int
    memory_bytes: float
    weights: Weights
    model: CostModel


def width_depth(
    graph: LayerGraph,
    cluster: Cluster,
    minibatch_rows: int,
    memory_bytes: float = 0,
    *,
    weights: Weights = "2bw",
    model: CostModel | None = None,
) -> list[WidthDepth]:
    """Evaluate every width, depth and profiled microbatch size, with and without recomputation.

    Stage i has devices i·w to (i+1)·w − 1. Its layers are cut by ``balance``, recomputation
    included, so that the slowest device decides as little as possible.

    Args:
        graph: the profile; all of ``graph.sizes`` are tried.
        cluster: w·d ≤ devices. Of the devices and links that a stage uses the slowest counts.
        minibatch_rows: B, of all replicas together.
        memory_bytes: of each device, if it says no less itself; 0 means not limited.
        weights: ``2bw``, two versions and no flush; ``gpipe``, one and a flush, evaluated with
            recomputation only, as in the paper.
        model: how gradient exchanges are costed; ``ring`` by default.

    Returns:
        Shortest minibatch first, those that do not fit among them; of equally short ones the one
        that needs less memory. Left out is what cannot run: where w·b does not divide B, or 2BW has
        fewer microbatches than stages.

    Raises:
        InputError: a count below 1, or no such way to keep weights.
    """
    one_of("weights", weights, ("2bw", "gpipe"))
    if minibatch_rows < 1 or memory_bytes < 0:
        raise InputError(
            f"minibatch_rows is {minibatch_rows} and memory_bytes {memory_bytes}; give at least "
            "one row, and a limit ≥ 0"
        )
    costs = model or cost_model("ring")
    task = _Task(cluster, Topology(cluster), minibatch_rows, memory_bytes, weights, costs)
    found = [
        _evaluated(task, graph.at(size), width, depth, recompute)
        for size in graph.sizes
        for width, depth in _shapes(task, size, len(graph.layers))
        for recompute in ((False, True) if weights == "2bw" else (True,))
    ]
    return sorted(found, key=lambda one: (one.minibatch_seconds, one.memory_bytes))


def _shapes(task: _Task, size: int, num_layers: int) -> Iterator[tuple[int, int]]:
    """(width, depth) of everything that can run with microbatches of this size."""
    num_devices = len(task.cluster.devices)
    for width in range(1, num_devices + 1):
        num_microbatches, rest = divmod(task.minibatch_rows, width * size)
        deepest = min(num_layers, num_devices // width)
        if task.weights == "2bw":
            deepest = min(deepest, num_microbatches)
        if not rest:
            yield from ((width, depth) for depth in range(1, deepest + 1))


def _evaluated(
    task: _Task, graph: LayerGraph, width: int, depth: int, recompute: bool
) -> WidthDepth:
    num_microbatches = task.minibatch_rows // (width * graph.microbatch_size)
    devices = [tuple(range(at * width, (at + 1) * width)) for at in range(depth)]
    speeds = [min(task.cluster.devices[at].speed for at in own) for own in devices]
    seconds = [_compute_seconds(layer, recompute) for layer in graph.layers]
    cuts = balance(seconds, depth, speeds=speeds)
    pipe = max(
        max(beat, exchange / num_microbatches)
        for beat, exchange in _stage_times(task, graph, cuts, devices, seconds)
    )
    needs = [
        _memory(task, graph, bounds, depth, num_microbatches, recompute)
        for bounds in pairwise(cuts)
    ]
    over = (
        need - min(_limits(task, own), default=need)
        for need, own in zip(needs, devices, strict=True)
    )
    filling = depth - 1 if task.weights == "gpipe" else 0
    return WidthDepth(
        width=width,
        depth=depth,
        microbatch_size=graph.microbatch_size,
        num_microbatches=num_microbatches,
        recompute=recompute,
        cuts=cuts,
        pipe_seconds=pipe,
        minibatch_seconds=(num_microbatches + filling) * pipe,
        memory_bytes=max(needs),
        over_bytes=max(over),
    )


def _compute_seconds(layer: Layer, recompute: bool) -> float:
    if not recompute:
        return layer.compute_seconds
    again = layer.recompute_seconds
    return layer.compute_seconds + (layer.forward_seconds if again is None else again)


def _stage_times(
    task: _Task,
    graph: LayerGraph,
    cuts: Sequence[int],
    devices: Sequence[tuple[int, ...]],
    seconds: Sequence[float],
) -> Iterator[tuple[float, float]]:
    """Of each stage, what it computes and receives for a microbatch, and its exchange."""
    crossing = graph.crossing_bytes
    hops = [
        _slowest_between(task, *neighbours, crossing[stop - 1])
        for stop, neighbours in zip(cuts[1:-1], pairwise(devices), strict=True)
    ]
    received = [one + other for one, other in pairwise((0.0, *hops, 0.0))]
    for (start, stop), own, hop in zip(pairwise(cuts), devices, received, strict=True):
        parameters = sum(layer.parameter_bytes for layer in graph.layers[start:stop])
        link = task.topology.slowest_link(own, parameters)
        speed = min(task.cluster.devices[at].speed for at in own)
        exchange = task.model.reduce_seconds(parameters, len(own), link)
        yield sum(seconds[start:stop]) / speed + hop, exchange


def _slowest_between(
    task: _Task, before: Sequence[int], behind: Sequence[int], num_bytes: float
) -> float:
    """From a stage to the next: replica k sends to replica k."""
    links = (task.topology.link(*pair) for pair in zip(before, behind, strict=True))
    return max((link.seconds(num_bytes) for link in links), default=Link().seconds(num_bytes))


def _memory(
    task: _Task,
    graph: LayerGraph,
    bounds: tuple[int, int],
    depth: int,
    num_microbatches: int,
    recompute: bool,
) -> float:
    start, stop = bounds
    layers = graph.layers[start:stop]
    weights = sum(layer.parameter_bytes for layer in layers)
    kept = sum(layer.activation_bytes for layer in layers)
    given = graph.crossing_bytes[start - 1] if start else graph.input_bytes
    if task.weights == "gpipe":
        return weights + kept + num_microbatches * given
    return 2 * weights + (kept if recompute else depth * kept) + depth * given


def _limits(task: _Task, devices: Sequence[int]) -> list[float]:
    """What each of them may use, where that is limited."""
    own = [task.cluster.devices[at].memory_bytes for at in devices]
    return [limit for limit in (*own, task.memory_bytes) if limit]
