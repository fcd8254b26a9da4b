"""PipeDream's programme against its own answers, and what becomes of nested plans."""

import json
from functools import cache

import pytest

from penstock.base.errors import InputError
from penstock.core.cluster import Cluster, Device, Group, Link, Topology, Wire
from penstock.core.graph import Layer, LayerGraph
from penstock.interop.pipedream_profiles import read_pipedream_graph
from penstock.planning.partition import best_partition, cost_model, evaluate
from penstock.planning.partition.steady import levels_of, nested_partition
from penstock.planning.partition.steady.evaluation import links_in_turns, usual_seconds
from penstock.planning.partition.steady.levels import (
    MOST_STEPS,
    Component,
    steps,
    worth_cutting,
)
from tests.kit.paths import PIPEDREAM

ROWS = json.loads((PIPEDREAM / "reference.json").read_text())
NAMES = [f"{row['model']}-{row['cluster']}" for row in ROWS]
TREES = [row for row in ROWS if len(row["bandwidths_Bps"]) > 1]
TREE_NAMES = [f"{row['model']}-{row['cluster']}" for row in TREES]
FAST, SLOW = Link(bytes_per_second=100.0), Link(bytes_per_second=1.0)


@cache
def graph_of(model: str) -> LayerGraph:
    return read_pipedream_graph(PIPEDREAM / model / "graph.txt")


def cluster_of(row: dict) -> Cluster:
    links = [Link(bytes_per_second=speed) for speed in row["bandwidths_Bps"]]
    return Cluster.tree(row["machines_per_level"], links)


def chain(*layers: tuple[float, int, int]) -> LayerGraph:
    """Of (seconds, parameter bytes, output bytes)."""
    return LayerGraph(
        layers=tuple(
            Layer(
                name=f"layer{index}",
                forward_seconds=seconds / 2,
                backward_input_seconds=seconds / 2,
                backward_weight_seconds=0.0,
                parameter_bytes=parameters,
                output_bytes=output,
            )
            for index, (seconds, parameters, output) in enumerate(layers)
        )
    )


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_the_objective_is_that_of_the_published_optimizer_on_prefixes(row):
    found = nested_partition(
        graph_of(row["model"]), cluster_of(row), cost_model("pipedream-released")
    )
    expected = row["linear_order"]["bottleneck_ms"]
    assert found.objective_seconds * 1000 == pytest.approx(expected, rel=1e-6)


OTHERS = [
    (row, name, entry)
    for row in TREES
    for name, entry in (("pipedream-paper", "paper_cost_model"), ("ring", "ring_cost_model"))
    if entry in row
]


@pytest.mark.parametrize(("row", "name", "entry"), OTHERS)
def test_the_objective_is_that_of_the_other_cost_models(row, name, entry):
    found = nested_partition(graph_of(row["model"]), cluster_of(row), cost_model(name))
    expected = row[entry]["bottleneck_ms"]
    assert found.objective_seconds * 1000 == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("row", TREES, ids=TREE_NAMES)
def test_the_best_partition_is_never_slower_than_the_programmes(row):
    graph, cluster = graph_of(row["model"]), cluster_of(row)
    model = cost_model("pipedream-released")
    nested = nested_partition(graph, cluster, model).partition
    assert nested.bottleneck_seconds == evaluate(graph, cluster, model, nested)
    best = best_partition(graph, cluster, model)
    assert best.bottleneck_seconds <= nested.bottleneck_seconds


REPLICATED_PIPELINE = chain((4.0, 40, 100), (4.0, 40, 0))
"""Its cut is too large for SLOW, and its gradients travel rarely."""


def test_a_pipeline_within_each_server_is_replicated_over_servers():
    cluster = Cluster.tree((2, 2), (FAST, SLOW))
    found = nested_partition(
        REPLICATED_PIPELINE, cluster, cost_model("ring", overlap=0.0), updates=0.01
    )
    inner = (Component(0, 1, 1), Component(1, 2, 1))
    assert found.components == (Component(0, 2, 2, inner),)
    # A stage takes 4 s, and every other microbatch; 80 bytes take 80 s, in every hundredth.
    assert found.objective_seconds == pytest.approx(4 / 2 + 0.8)
    # Each stage has its own 40.
    assert found.partition.bottleneck_seconds == pytest.approx(4 / 2 + 0.4)
    assert [stage.devices for stage in found.partition.stages] == [(0, 2), (1, 3)]


def test_it_wins_where_no_stages_on_neighbours_are_as_fast():
    cluster = Cluster.tree((2, 2), (FAST, SLOW))
    best = best_partition(
        REPLICATED_PIPELINE, cluster, cost_model("ring", overlap=0.0), updates=0.01
    )
    assert best.method == "PipeDream's programme, level by level"
    assert best.bottleneck_seconds == pytest.approx(2.4)
    assert [stage.devices for stage in best.stages] == [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    "options",
    [
        {"fits": lambda layers, replicas, in_flight: in_flight < 2 or 0 not in layers},
        {"straight": True},
        {"num_devices": 3},
    ],
    ids=["fits", "straight", "fewer devices"],
)
def test_it_keeps_to_what_was_asked(options):
    cluster = Cluster.tree((2, 2), (FAST, SLOW))
    best = best_partition(
        REPLICATED_PIPELINE, cluster, cost_model("ring", overlap=0.0), updates=0.01, **options
    )
    assert "level by level" not in best.method


def test_three_levels():
    graph = chain(*[(1.0, 1, 1)] * 8)
    cluster = Cluster.tree((2, 2, 2), (FAST, FAST, SLOW))
    found = nested_partition(graph, cluster, cost_model("ring"), updates=0.01)
    devices = sorted(device for stage in found.partition.stages for device in stage.devices)
    assert devices == list(range(8))
    assert found.partition.bottleneck_seconds <= found.objective_seconds == pytest.approx(1.0)


def test_states_without_a_difference_are_left_out():
    graph = chain((0.0, 0, 9), (1.0, 0, 5), (0.0, 0, 3), (0.0, 0, 4), (1.0, 0, 0), (0.0, 0, 0))
    kept = [state.bit_length() for state in worth_cutting(graph).sets]
    assert kept == [0, 3, 6]
    nothing = chain((0.0, 0, 1), (0.0, 0, 1))
    assert [state.bit_length() for state in worth_cutting(nothing).sets] == [0, 2]
    assert nested_partition(
        nothing, Cluster.tree((2, 2), (FAST, SLOW)), cost_model("ring")
    ).partition.stages[0].layers == ("layer0", "layer1")


def test_levels_of_a_regular_tree():
    levels = levels_of(Cluster.tree((4, 2), (FAST, SLOW)))
    assert levels is not None
    assert (levels.counts, levels.links) == ((4, 2), (FAST, SLOW))
    assert levels.devices == tuple(range(8))


def server(name: str, *members: str, link: Link = FAST) -> Group:
    return Group(name=name, members=members, link=link)


DEVICES = tuple(Device(name=name) for name in "abcd")


def test_devices_of_a_group_need_not_be_listed_together():
    groups = (server("one", "a", "c"), server("two", "b", "d"))
    levels = levels_of(Cluster(devices=DEVICES, link=SLOW, groups=groups))
    assert levels is not None
    assert levels.devices == (0, 2, 1, 3)


@pytest.mark.parametrize(
    "parts",
    [
        {"groups": (server("one", "a", "b", "c"), server("two", "d"))},
        {"groups": (server("one", "a", "b"),)},
        {"groups": (server("one", "a", "b"), server("two", "c", "d", link=SLOW))},
        {"wires": (Wire(between=("a", "b"), link=FAST),)},
        {"devices": (*DEVICES[:3], Device(name="d", speed=2.0))},
    ],
    ids=["sizes", "depths", "links", "wires", "speeds"],
)
def test_other_clusters_are_refused(parts):
    cluster = Cluster(**({"devices": DEVICES, "link": SLOW} | parts))
    assert levels_of(cluster) is None
    with pytest.raises(InputError, match="needs a regular tree"):
        nested_partition(chain((1.0, 1, 1)), cluster, cost_model("ring"))
    assert best_partition(chain((1.0, 1, 1)), cluster, cost_model("ring")).stages


def test_what_would_take_seconds_is_left_to_others():
    graph = chain(*[(1.0, 1, 1)] * 200)
    assert steps(len(graph.layers) + 1, (2, 80), 1.0) < MOST_STEPS
    wide = Cluster.tree((2, 400), (FAST, SLOW))
    assert steps(len(graph.layers) + 1, (2, 400), 1.0) > MOST_STEPS
    assert "slowest" in best_partition(graph, wide, cost_model("ring")).method
    # Rare updates differ between groups, each with a table of its own.
    assert steps(200, (8, 8), 0.01) > 7 * steps(200, (8, 8), 1.0)


@pytest.mark.parametrize("updates", [0, -1, 2, "often", True])
def test_updates_without_a_meaning_are_refused(updates):
    with pytest.raises(InputError, match="updates"):
        nested_partition(
            chain((1.0, 1, 1)), Cluster.tree((2,), (FAST,)), cost_model("ring"), updates=updates
        )


@pytest.mark.parametrize("num_senders", [40, 64, 65])
def test_where_many_meet_in_turns_the_slowest_of_their_links_counts(num_senders):
    topology = Topology(Cluster.tree([8, 16], [FAST, SLOW]))
    senders, readers = range(num_senders), range(num_senders, 128)
    meet = {(senders[k % len(senders)], readers[k % len(readers)]) for k in range(128 * 128)}
    slowest = max((topology.link(*pair) for pair in meet), key=usual_seconds)
    assert max(links_in_turns(topology, senders, readers), key=usual_seconds) == slowest


def test_those_that_meet_in_turns_inside_a_host_have_its_link_alone():
    topology = Topology(Cluster.tree([8, 16], [FAST, SLOW]))
    assert {*links_in_turns(topology, range(4), range(4, 8))} == {FAST}
