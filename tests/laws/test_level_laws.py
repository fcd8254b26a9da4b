"""PipeDream's programme against brute force over every nested plan."""

from functools import cache
from itertools import combinations, pairwise, product
from math import lcm, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.cluster import Cluster, Link
from penstock.planning.partition import best_partition, cost_model, evaluate
from penstock.planning.partition.layers import handed_on
from penstock.planning.partition.steady import nested_partition
from tests.kit.examples import examples
from tests.laws.test_exact_partition_laws import MODELS, UPDATES, graphs, links

COUNTS = st.sampled_from([(1,), (3,), (2, 2), (2, 3), (3, 2), (4, 1), (2, 1, 2), (2, 2, 2)])


@st.composite
def trees(draw):
    counts = draw(COUNTS)
    joined = [draw(links()) for _ in counts]
    # Outer links are slower, as in every machine room.
    for level in range(1, len(joined)):
        inner = joined[level - 1]
        joined[level] = Link(
            latency_seconds=inner.latency_seconds * 2,
            bytes_per_second=inner.bytes_per_second / draw(st.sampled_from([1, 4])),
        )
    return counts, joined


def crossing(graph, start):
    return sum(size for source, readers, size in handed_on(graph) if source < start <= max(readers))


def pipeline(graph, counts, joined, model, rate, parts):
    """Seconds of (start, stop, replicas, seconds of one replica) in sequence."""
    beats = []
    for index, (start, stop, number, seconds) in enumerate(parts):
        size = sum(layer.parameter_bytes for layer in graph.layers[start:stop])
        exchange = model.reduce_seconds(size, number, joined[len(counts) - 1])
        if model.name == "pipedream-released" and index == 0:
            exchange /= prod(counts[:-1])
        beats.append(model.shared_seconds(seconds, exchange, number, rate))
        if index:
            fewer = min(parts[index - 1][2], number)
            link = joined[len(counts) - 1]
            beats.append(model.cut_seconds(crossing(graph, start), fewer, link))
    return max(beats)


def compute(graph, start, stop):
    return sum(layer.compute_seconds for layer in graph.layers[start:stop])


def brute_force(graph, counts, joined, model, updates):
    """The programme's value, by trying every pipeline of components at every level."""

    @cache
    def best(counts, start, stop, rate):
        return min(
            pipeline(graph, counts, joined, model, rate, parts(counts, bounds, replicas, rate))
            for size in range(stop - start)
            for cuts in combinations(range(start + 1, stop), size)
            for bounds in [tuple(pairwise((start, *cuts, stop)))]
            for replicas in product(range(1, counts[-1] + 1), repeat=len(bounds))
            if sum(replicas) <= counts[-1]
        )

    def parts(counts, bounds, replicas, rate):
        return [
            (*pair, number, inside(counts[:-1], *pair, min(1.0, rate * number)))
            for pair, number in zip(bounds, replicas, strict=True)
        ]

    def inside(counts, start, stop, rate):
        return best(counts, start, stop, rate) if counts else compute(graph, start, stop)

    return best(counts, 0, len(graph.layers), updates)


@examples(50)
@given(st.booleans().flatmap(lambda branching: graphs(branching, 5)), trees(), MODELS, UPDATES)
def test_the_programme_is_exact(graph, tree, model, updates):
    counts, joined = tree
    found = nested_partition(graph, Cluster.tree(counts, joined), model, updates=updates)
    expected = brute_force(graph, counts, joined, model, updates)
    assert found.objective_seconds == pytest.approx(expected, rel=1e-9, abs=1e-12)


def value_of(components, graph, counts, joined, model, rate):
    """Of what was found, asked of the components themselves."""
    parts = []
    for one in components:
        inner = compute(graph, one.start, one.stop)
        if one.inner:
            own = min(1.0, rate * one.replicas)
            inner = value_of(one.inner, graph, counts[:-1], joined, model, own)
        parts.append((one.start, one.stop, one.replicas, inner))
    return pipeline(graph, counts, joined, model, rate, parts)


@examples(50)
@given(graphs(True, 8), trees(), MODELS, UPDATES)
def test_a_plan_is_worth_what_the_programme_says_and_keeps_microbatches_in_their_group(
    graph, tree, model, updates
):
    counts, joined = tree
    cluster = Cluster.tree(counts, joined)
    found = nested_partition(graph, cluster, model, updates=updates)
    own = value_of(found.components, graph, counts, joined, model, updates)
    assert own == pytest.approx(found.objective_seconds, rel=1e-9, abs=1e-12)
    assert sum(found.partition.replicas) <= prod(counts)
    at = 0
    for one in found.components:
        inner = [
            stage for stage in found.partition.stages
            if one.start <= int(stage.layers[0].removeprefix("layer")) < one.stop
        ]  # fmt: skip
        size = prod(counts[:-1])
        for k in range(lcm(*(stage.replicas for stage in inner))):
            groups = {stage.devices[k % stage.replicas] // size for stage in inner}
            assert groups == {at + k % one.replicas}
        at += one.replicas


@examples(40)
@given(graphs(False, 7), trees(), UPDATES)
def test_a_ring_needs_no_longer_than_the_programme_says(graph, tree, updates):
    """Where nothing is hidden: the programme hides each level's exchange behind the same compute
    once more, which one ring cannot."""
    cluster, model = Cluster.tree(*tree), cost_model("ring", 0.0)
    found = nested_partition(graph, cluster, model, updates=updates)
    seconds = evaluate(graph, cluster, model, found.partition, updates)
    assert seconds == found.partition.bottleneck_seconds
    assert seconds <= found.objective_seconds * (1 + 1e-9)


@examples(30)
@given(graphs(False, 6), trees(), MODELS, UPDATES)
def test_the_best_partition_is_no_slower_than_the_programmes(graph, tree, model, updates):
    cluster = Cluster.tree(*tree)
    nested = nested_partition(graph, cluster, model, updates=updates).partition
    best = best_partition(graph, cluster, model, updates=updates)
    assert best.bottleneck_seconds <= nested.bottleneck_seconds * (1 + 1e-9)
    assert evaluate(graph, cluster, model, best, updates) == best.bottleneck_seconds
