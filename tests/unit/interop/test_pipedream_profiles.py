"""Reading PipeDream's graph.txt: the five profiles, and what is wrong with broken ones."""

from pathlib import Path

import pytest

from penstock.base.errors import FileError
from penstock.interop.pipedream_profiles import read_pipedream_graph
from tests.kit.paths import PIPEDREAM

COSTS = "forward_compute_time=1.0, backward_compute_time=2.0, activation_size=8.0, parameter_size="


def node(name: str, kind: str = "Linear(2, 2)", parameters: str = "16.000") -> str:
    return f"{name} -- {kind} -- {COSTS}{parameters}"


def read(tmp_path: Path, *lines: str):
    path = tmp_path / "graph.txt"
    path.write_text("\n".join(lines) + "\n")
    return read_pipedream_graph(path)


@pytest.mark.parametrize(
    ("model", "num_layers", "seconds", "megabytes"),
    [
        ("alexnet", 22, 0.085321, 244.4),
        ("vgg16", 40, 0.672535, 553.43),
        ("resnet50", 176, 0.443419, 102.23),
        ("densenet121", 428, 0.326155, 31.92),
        ("gnmt_large", 93, 0.520453, 1110.87),
    ],
)
def test_the_profiles_have_their_layers_times_and_sizes(model, num_layers, seconds, megabytes):
    graph = read_pipedream_graph(PIPEDREAM / model / "graph.txt")
    assert len(graph.layers) == num_layers
    assert sum(one.compute_seconds for one in graph.layers) == pytest.approx(seconds)
    assert sum(one.parameter_bytes for one in graph.layers) / 1e6 == pytest.approx(megabytes, 2e-4)
    numbers = [int(one.name.removeprefix("node")) for one in graph.layers]
    assert numbers == sorted(numbers)


def test_odd_measurements_of_gnmt_are_pointed_out():
    layers = read_pipedream_graph(PIPEDREAM / "gnmt_large" / "graph.txt").layers
    odd = [(one.kind, one.warnings[0]) for one in layers if one.warnings]
    assert [kind for kind, _ in odd].count("Concat") == 7
    assert [kind for kind, text in odd if "far below its forward" in text] == ["EmuBidirLSTM"]


def test_lines_may_be_in_any_order_and_lists_of_sizes_are_summed(tmp_path):
    lists = "activation_size=[8.0; 4.0; 4.0]"
    graph = read(
        tmp_path,
        node("node3"),
        node("node10").replace("activation_size=8.0", lists) + " -- stage_id=1",
        node("node2"),
        "\tnode3 -- node10",
        "\tnode2 -- node3",
        "\tnode2 -- node10",
    )
    assert [one.name for one in graph.layers] == ["node2", "node3", "node10"]
    assert graph.layers[2].inputs == ("node3", "node2")
    assert graph.layers[2].output_bytes == 16
    assert graph.crossing_bytes == (8, 16)


def test_numbers_that_contradict_the_edges_give_way(tmp_path):
    graph = read(tmp_path, node("node1"), node("node2"), "\tnode2 -- node1")
    assert [one.name for one in graph.layers] == ["node2", "node1"]


def test_inputs_are_dropped_and_remembered(tmp_path):
    graph = read(tmp_path, node("node1", "Input", "0.0"), node("node2"), "\tnode1 -- node2")
    assert [one.name for one in graph.layers] == ["node2"]
    assert graph.layers[0].inputs == ()
    assert graph.input_bytes == 8


def test_backwards_are_split_by_what_is_asked_for(tmp_path):
    graph = read(
        tmp_path,
        node("node1"),
        node("node2"),
        node("node3", "ReLU(inplace)", "0.000"),
        "\tnode1 -- node2",
        "\tnode2 -- node3",
    )
    halves = [(one.backward_input_seconds, one.backward_weight_seconds) for one in graph.layers]
    assert halves == [(0.0, 0.002), (0.001, 0.001), (0.002, 0.0)]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["node1 -- Linear"], "line 1: a node is written"),
        ([node("node1"), node("node1")], "line 2: node1 was there in line 1"),
        ([node("node1", parameters="many")], "line 1: parameter_size is 'many'"),
        ([node("node1", parameters="-4.0")], "line 1: parameter_size is -4.0"),
        ([node("node1", parameters="nan")], "line 1: parameter_size is nan"),
        ([node("node1", parameters="[]")], "line 1: parameter_size is"),
        (["node1 -- Linear -- activation_size=4"], "forward_compute_time and"),
        ([node("node1"), "\tnode1 -- node2"], "line 2: no node is called 'node2'"),
        ([node("node1"), "\tnode1"], "line 2: an edge is written"),
        (
            [node("node1"), node("node2"), "\tnode1 -- node2", "\tnode2 -- node1"],
            "line 1: node1 is on or behind a circle",
        ),
        ([node("node1", "Input0")], "no node besides inputs"),
        ([""], "no node besides inputs"),
    ],
)
def test_malformed_text_is_refused_with_file_line_and_reason(tmp_path, lines, reason):
    with pytest.raises(FileError, match=r"graph\.txt") as caught:
        read(tmp_path, *lines)
    assert reason in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileError, match="nowhere"):
        read_pipedream_graph(tmp_path / "nowhere")
