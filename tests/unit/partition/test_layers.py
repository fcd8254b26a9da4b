"""Who reads what: the partitioners' view of a graph against the graph's own."""

from __future__ import annotations

import random

import pytest

from penstock.core.cluster import Cluster, Link
from penstock.core.graph import Layer, LayerGraph
from penstock.planning.partition import Partition, PartitionedStage, cost_model, evaluate
from penstock.planning.partition.layers import handed_on, reads_of, skips_of, sources_of
from penstock.planning.partition.steady.states import prefixes


def layer(name, **more):
    free = {"forward_seconds": 0.0, "backward_input_seconds": 0.0, "backward_weight_seconds": 0.0}
    return Layer(name=name, **free, **more)


def random_graph(seed, num_layers=9):
    draw = random.Random(seed)
    layers = []
    for at in range(num_layers):
        more = {"output_bytes": draw.randint(0, 40)}
        if draw.random() < 0.6:
            count = draw.randint(0, min(at, 2))
            more["inputs"] = tuple(f"l{one}" for one in draw.sample(range(at), count))
        if draw.random() < 0.4 and at + 1 < num_layers:
            more["skip_bytes"] = {f"l{draw.randrange(at + 1, num_layers)}": draw.randint(1, 40)}
        if draw.random() < 0.2 and at:
            more["after"] = (f"l{draw.randrange(at)}",)
        layers.append(layer(f"l{at}", **more))
    return LayerGraph(layers=tuple(layers))


def test_inputs_skips_and_what_only_comes_after():
    graph = LayerGraph(
        layers=(
            layer("a", output_bytes=3, skip_bytes={"d": 5}),
            layer("b", output_bytes=7),
            layer("c", inputs=(), output_bytes=11, after=("a",)),
            layer("d", inputs=("b", "c")),
        )
    )
    assert sources_of(graph) == [[], [0], [], [1, 2]]
    assert reads_of(graph) == ((0, 1), (1, 3), (2, 3))
    assert sorted(skips_of(graph)) == [(0, 2, 0), (0, 3, 5)]
    assert sorted(handed_on(graph)) == [
        (0, [1], 3), (0, [2], 0), (0, [3], 5), (1, [3], 7), (2, [3], 11),
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_over_every_cut_goes_what_the_graph_says(seed):
    graph = random_graph(seed)
    ends = range(1, len(graph.layers))
    over = [
        sum(size for source, readers, size in handed_on(graph) if source < end <= max(readers))
        for end in ends
    ]
    assert tuple(over) == graph.crossing_bytes
    assert tuple(prefixes(graph).cut_bytes[1:-1]) == graph.crossing_bytes
    names = [one.name for one in graph.layers]
    cluster, model = Cluster.tree((2,), (Link(bytes_per_second=1.0),)), cost_model("ring")
    for end in ends:
        cut = (
            PartitionedStage(tuple(names[:end]), (0,)),
            PartitionedStage(tuple(names[end:]), (1,)),
        )
        seconds = evaluate(graph, cluster, model, Partition(cut, 0.0))
        assert seconds == 2 * graph.crossing_bytes[end - 1]
