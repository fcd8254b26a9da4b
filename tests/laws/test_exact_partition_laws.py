"""The searches against brute force over every cut, every count of replicas and every limit."""

from itertools import combinations, pairwise, product
from math import ceil, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import PlanError
from penstock.core.cluster import Cluster, Device, Link
from penstock.core.graph import Layer, LayerGraph
from penstock.planning.partition import (
    COST_MODELS,
    Partition,
    PartitionedStage,
    best_partition,
    cost_model,
    evaluate,
)
from penstock.planning.partition.steady import nested_partition

MODELS = st.builds(
    cost_model, st.sampled_from(COST_MODELS), overlap=st.sampled_from([0.0, 0.4, 1.0])
)
UPDATES = st.sampled_from([1.0, 0.3, 0.05])


@st.composite
def graphs(draw, branching: bool, most: int):
    layers = []
    for index in range(draw(st.integers(1, most))):
        names = [layer.name for layer in layers]
        inputs = draw(st.sets(st.sampled_from(names), max_size=2)) if names else set()
        seconds = draw(st.sampled_from([0.0, 0.0, 1.0, 2.0, 3.5, 7.0]))
        layer = Layer(
            name=f"layer{index}",
            forward_seconds=seconds,
            backward_input_seconds=seconds,
            backward_weight_seconds=0.0,
            output_bytes=draw(st.sampled_from([0, 1, 4, 10])),
            parameter_bytes=draw(st.sampled_from([0, 0, 3, 30])),
            activation_bytes=draw(st.integers(0, 5)),
            inputs=tuple(sorted(inputs)) if branching else None,
        )
        layers.append(layer)
    return LayerGraph(layers=tuple(layers))


def links():
    return st.builds(
        Link,
        latency_seconds=st.sampled_from([0.0, 0.1]),
        bytes_per_second=st.sampled_from([0.0, 1.0, 5.0]),
    )


def flat(num_devices: int, link: Link) -> Cluster:
    return Cluster(devices=tuple(Device(name=f"d{k}") for k in range(num_devices)), link=link)


def divisions(graph: LayerGraph, branching: bool):
    """Every list of stages, each a list of layers by index."""
    count = len(graph.layers)
    if not branching:
        for size in range(count):
            for cuts in combinations(range(1, count), size):
                ends = (0, *cuts, count)
                yield [list(range(a, b)) for a, b in pairwise(ends)]
        return
    place = {layer.name: index for index, layer in enumerate(graph.layers)}
    for stage_of in product(range(count), repeat=count):
        used = max(stage_of) + 1
        sources = [(place[n], k) for k, one in enumerate(graph.layers) for n in one.inputs or ()]
        if len(set(stage_of)) == used and all(stage_of[a] <= stage_of[b] for a, b in sources):
            yield [[k for k in range(count) if stage_of[k] == s] for s in range(used)]


def brute_force(
    graph,
    cluster,
    model,
    *,
    branching=False,
    updates=1.0,
    fits=None,
    straight=False,
    anywhere=False,
):
    """The least bottleneck of all partitions on devices in order; infinite if nothing fits.

    ``anywhere`` also tries to begin behind the first device.
    """
    best, there = inf, len(cluster.devices)
    for stages in divisions(graph, branching):
        for counts in product(range(1, 2 if straight else there + 1), repeat=len(stages)):
            if sum(counts) > there:
                continue
            behind = [sum(counts[index + 1 :]) for index in range(len(counts))]
            if fits and not all(
                fits(own, count, 1 + ceil(rest / count))
                for own, count, rest in zip(stages, counts, behind, strict=True)
            ):
                continue
            for first in range(there - sum(counts) + 1 if anywhere else 1):
                made = _placed(graph, stages, counts, first)
                best = min(best, evaluate(graph, cluster, model, made, updates))
    return best


def _placed(graph, stages, counts, first):
    placed = []
    for own, count in zip(stages, counts, strict=True):
        names = tuple(graph.layers[index].name for index in own)
        placed.append(PartitionedStage(names, tuple(range(first, first + count))))
        first += count
    return Partition(tuple(placed), inf)


def limit_on(graph: LayerGraph, limit: int):
    """Memory like PipeDream's: a copy of weights and activations for each microbatch in flight,
    and less where replicas share the optimizer's state."""

    def fits(layers, num_replicas, in_flight):
        own = [graph.layers[index] for index in layers]
        kept = sum(layer.activation_bytes + layer.parameter_bytes / 10 for layer in own)
        return (
            kept * in_flight + sum(layer.parameter_bytes for layer in own) / num_replicas <= limit
        )

    return fits


def equal(graph, cluster, model, expected, **options):
    if expected == inf:
        with pytest.raises(PlanError):
            best_partition(graph, cluster, model, **options)
        return
    found = best_partition(graph, cluster, model, **options)
    assert found.bottleneck_seconds == pytest.approx(expected, rel=1e-9, abs=1e-12)
    updates = options.get("updates", 1.0)
    assert evaluate(graph, cluster, model, found, updates) == found.bottleneck_seconds
    assert sum(found.replicas) <= len(cluster.devices)


@settings(deadline=None, max_examples=60)
@given(graphs(False, 7), st.integers(1, 5), links(), MODELS, UPDATES, st.booleans())
def test_chains_on_flat_clusters_are_optimal(graph, num_devices, link, model, updates, straight):
    cluster = flat(num_devices, link)
    expected = brute_force(graph, cluster, model, updates=updates, straight=straight)
    equal(graph, cluster, model, expected, updates=updates, straight=straight)


@settings(deadline=None, max_examples=60)
@given(graphs(False, 6), st.integers(1, 4), links(), MODELS, st.integers(5, 40), st.booleans())
def test_memory_is_kept_to_exactly(graph, num_devices, link, model, limit, straight):
    cluster, fits = flat(num_devices, link), limit_on(graph, limit)
    expected = brute_force(graph, cluster, model, fits=fits, straight=straight)
    equal(graph, cluster, model, expected, fits=fits, straight=straight)
    if expected < inf:
        found = best_partition(graph, cluster, model, fits=fits, straight=straight)
        behind = 0
        for stage in reversed(found.stages):
            own = [int(name.removeprefix("layer")) for name in stage.layers]
            assert fits(own, stage.replicas, 1 + ceil(behind / stage.replicas))
            behind += stage.replicas


@settings(deadline=None, max_examples=60)
@given(graphs(True, 5), st.integers(1, 3), links(), MODELS, st.sampled_from([0, 15, 30]))
def test_branching_graphs_are_optimal_over_all_cuts(graph, num_devices, link, model, limit):
    cluster = flat(num_devices, link)
    fits = limit_on(graph, limit) if limit else None
    expected = brute_force(graph, cluster, model, branching=True, fits=fits)
    equal(graph, cluster, model, expected, fits=fits, order="any")


def test_layers_that_only_take_memory_may_be_cut_off():
    """Four layers beside each other: the last has to come first, since less fits there."""
    layers = tuple(
        Layer(
            name=f"layer{index}",
            forward_seconds=0.0,
            backward_input_seconds=0.0,
            backward_weight_seconds=0.0,
            activation_bytes=kept,
            parameter_bytes=weights,
            inputs=(),
        )
        for index, (kept, weights) in enumerate([(5, 0), (5, 0), (0, 0), (4, 3)])
    )
    graph, cluster, fits = (
        LayerGraph(layers=layers),
        flat(2, Link()),
        limit_on(LayerGraph(layers=layers), 15),
    )
    for name in COST_MODELS:
        model = cost_model(name)
        expected = brute_force(graph, cluster, model, branching=True, fits=fits)
        assert expected == 0.0
        equal(graph, cluster, model, expected, fits=fits, order="any")


@settings(deadline=None, max_examples=40)
@given(graphs(False, 5), links(), links(), MODELS, UPDATES, st.booleans())
def test_servers_are_used_as_well_as_their_order_allows(graph, inner, outer, model, updates, big):
    # The outer link is no faster than the inner one, as in every machine room.
    slow = Link(
        latency_seconds=inner.latency_seconds + outer.latency_seconds,
        bytes_per_second=inner.bytes_per_second / 4 if inner.bytes_per_second else 0.5,
    )
    cluster = Cluster.tree((2, 2) if big else (3, 1), (inner, slow))
    in_order = brute_force(graph, cluster, model, updates=updates, anywhere=True)
    nested = nested_partition(graph, cluster, model, updates=updates).partition
    expected = min(in_order, nested.bottleneck_seconds)
    equal(graph, cluster, model, expected, updates=updates)


@settings(deadline=None, max_examples=40)
@given(
    graphs(False, 5),
    st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=4),
    links(),
    MODELS,
    st.booleans(),
)
def test_mixed_speeds_count_in_order(graph, speeds, link, model, straight):
    devices = tuple(Device(name=f"d{k}", speed=speed) for k, speed in enumerate(speeds))
    cluster = Cluster(devices=devices, link=link)
    anywhere = brute_force(graph, cluster, model, straight=straight, anywhere=True)
    found = best_partition(graph, cluster, model, straight=straight)
    assert found.bottleneck_seconds == pytest.approx(anywhere, rel=1e-9, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(graphs(True, 8), st.integers(2, 6), links(), MODELS, st.sampled_from(["any", "execution"]))
def test_more_devices_and_more_cuts_are_never_worse(graph, num_devices, link, model, order):
    cluster = flat(num_devices, link)
    more = best_partition(graph, cluster, model, order=order).bottleneck_seconds
    fewer = best_partition(graph, cluster, model, order=order, num_devices=num_devices - 1)
    assert more <= fewer.bottleneck_seconds * (1 + 1e-9)
    every = best_partition(graph, cluster, model, order="any").bottleneck_seconds
    assert every <= more * (1 + 1e-9)


@pytest.mark.parametrize(("sizes", "expected"), [((1, 10), 2.0), ((10, 1), 2.0)])
def test_a_layer_without_cost_is_cut_from_its_source_only_where_that_sends_less(sizes, expected):
    seconds = (2.0, 0.0, 2.0)
    layers = tuple(
        Layer(
            name=f"layer{index}",
            forward_seconds=seconds[index],
            backward_input_seconds=0.0,
            backward_weight_seconds=0.0,
            parameter_bytes=index * 50,
            output_bytes=(*sizes, 0)[index],
        )
        for index in (0, 1, 2)
    )
    layers = (layers[0], Layer(**_fields(layers[1]) | {"parameter_bytes": 0}), layers[2])
    cluster = flat(2, Link(bytes_per_second=1.0))
    for order in ("execution", "any"):
        found = best_partition(
            LayerGraph(layers=layers), cluster, cost_model("ring", 0.0), order=order
        )
        assert found.bottleneck_seconds == pytest.approx(expected)


def _fields(layer: Layer) -> dict:
    return {name: getattr(layer, name) for name in layer.__struct_fields__}
