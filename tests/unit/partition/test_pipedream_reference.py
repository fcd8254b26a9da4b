"""Never worse than PipeDream's optimizer: five models, fifteen clusters, its cost models."""

import json
from functools import cache

import pytest

from penstock.core.cluster import Cluster, Link
from penstock.core.graph import LayerGraph
from penstock.interop.pipedream_profiles import read_pipedream_graph
from penstock.planning.partition import Partition, best_partition, cost_model, evaluate
from tests.kit.examples import in_turns
from tests.kit.paths import PIPEDREAM

ROWS = json.loads((PIPEDREAM / "reference.json").read_text())
RELEASED = cost_model("pipedream-released")


def name_of(row: dict) -> str:
    return f"{row['model']}-{row['cluster']}"


# Every other one: all models, and all clusters.
SOME = pytest.mark.parametrize("row", in_turns(zip(ROWS, strict=True), 2), ids=name_of)


@cache
def graph_of(model: str) -> LayerGraph:
    return read_pipedream_graph(PIPEDREAM / model / "graph.txt")


def cluster_of(row: dict, free: bool = False) -> Cluster:
    speeds = [0.0 if free else speed for speed in row["bandwidths_Bps"]]
    return Cluster.tree(row["machines_per_level"], [Link(bytes_per_second=one) for one in speeds])


def never_worse(row: dict, found: Partition, *entries: str) -> None:
    graph, cluster = graph_of(row["model"]), cluster_of(row)
    for entry in entries:
        if entry in row:
            limit = row[entry]["bottleneck_ms"] * (1 + 1e-6)
            assert 0 < found.bottleneck_seconds * 1000 <= limit, entry
    assert sum(found.replicas) <= len(cluster.devices)
    names = [name for stage in found.stages for name in stage.layers]
    assert sorted(names) == sorted(layer.name for layer in graph.layers)


def searched(row: dict, model=RELEASED, **options) -> Partition:
    return best_partition(graph_of(row["model"]), cluster_of(row), model, **options)


@SOME
def test_all_cuts_of_the_graph_beat_every_entry(row):
    found = searched(row, order="any")
    never_worse(row, found, "shipped", "fixed_cut_bytes", "best_known", "flat_all_links_slow")
    never_worse(row, found, "linear_order", "straight")
    seconds = evaluate(graph_of(row["model"]), cluster_of(row), RELEASED, found)
    assert found.bottleneck_seconds == seconds


@SOME
def test_cuts_of_the_execution_order_beat_the_linear_and_flat_entries(row):
    never_worse(row, searched(row), "linear_order", "flat_all_links_slow")


@SOME
def test_straight_pipelines_are_straight_and_no_worse(row):
    found = searched(row, straight=True, order="any")
    assert set(found.replicas) == {1}
    never_worse(row, found, "straight")


@SOME
def test_the_papers_formulas_and_a_ring_beat_their_entries(row):
    never_worse(row, searched(row, cost_model("pipedream-paper"), order="any"), "paper_cost_model")
    never_worse(row, searched(row, cost_model("ring"), order="any"), "ring_cost_model")


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if "no_comm_default_flags" in row and len(row["bandwidths_Bps"]) < 2],
)
def test_without_messages_compute_and_exchanges_alone_decide(row):
    layers = tuple(
        type(layer)(**{f: getattr(layer, f) for f in layer.__struct_fields__} | {"output_bytes": 0})
        for layer in graph_of(row["model"]).layers
    )
    found = best_partition(LayerGraph(layers=layers), cluster_of(row), RELEASED, order="any")
    never_worse(row, found, "no_comm_default_flags")


@pytest.mark.parametrize(
    ("model", "cluster", "replicas"),
    [
        ("vgg16", "flat16_25Gbps", (15, 1)),
        ("alexnet", "flat16_10Gbps", (15, 1)),
        ("gnmt_large", "flat16_25Gbps", (1,) * 12 + (3, 1)),
    ],
)
def test_the_known_configurations_appear(model, cluster, replicas):
    (row,) = [one for one in ROWS if (one["model"], one["cluster"]) == (model, cluster)]
    assert searched(row, order="any").replicas == replicas


def test_stages_that_cross_servers_win_where_the_original_cannot_have_them():
    (row,) = [one for one in ROWS if (one["model"], one["cluster"]) == ("vgg16", "A_2x4")]
    found = searched(row)
    assert found.bottleneck_seconds * 1000 < 0.65 * row["shipped"]["bottleneck_ms"]
    assert found.replicas == (7, 1)
