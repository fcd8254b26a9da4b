"""How a group shares layers: what comes out for known models, and what every choice costs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.base.errors import InputError
from penstock.core.cluster import Link
from penstock.core.graph import Layer, LayerGraph
from penstock.planning.partition.tensor import split_layers
from penstock.planning.partition.tensor_layouts import DeviceRing, ways
from tests.kit.paths import DOCS
from tests.kit.tensor_models import alexnet, transformer, vgg16

ETHERNET = Link(latency_seconds=1e-5, bytes_per_second=12.5e9)  # 100 Gbit/s
NVLINK = Link(latency_seconds=5e-6, bytes_per_second=200e9)


def layer(name, kind="Linear", **costs):
    usual = {
        "forward_seconds": 1.0,
        "backward_input_seconds": 1.0,
        "backward_weight_seconds": 1.0,
        "output_bytes": 8000,
        "parameter_bytes": 8000,
    }
    return Layer(name=name, kind=kind, **(usual | costs))


def graph_of(*layers, rows=8):
    return LayerGraph(layers=layers, microbatch_size=rows)


def splits_of_kind(split, graph, kind):
    return {split.splits[layer.name] for layer in graph.layers if layer.kind == kind}


# One weird trick (Krizhevsky, arXiv 1404.5997).


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("model", [alexnet, vgg16])
def test_a_cnn_divides_rows_of_convolutions_and_parameters_of_linear_layers(model, ranks):
    graph = model()
    split = split_layers(graph, ranks, NVLINK, num_microbatches=1)
    assert splits_of_kind(split, graph, "Conv2d") == {"data"}
    assert splits_of_kind(split, graph, "Linear") == {"column", "row"}
    assert split.seconds < min(split.data_seconds, split.tensor_seconds)
    assert split.moved_bytes < min(split.data_moved_bytes, split.tensor_moved_bytes)


@pytest.mark.parametrize("model", [alexnet, vgg16])
def test_over_a_slow_network_too_only_convolutions_divide_rows(model):
    graph = model()
    split = split_layers(
        graph, 4, Link(latency_seconds=1e-5, bytes_per_second=1.25e9), num_microbatches=1
    )
    assert splits_of_kind(split, graph, "Conv2d") == {"data"}
    assert "data" not in splits_of_kind(split, graph, "Linear")
    assert split.moved_bytes * 8 < split.data_moved_bytes


def test_the_numbers_of_the_page_about_it():
    split = split_layers(alexnet(), 4, ETHERNET, num_microbatches=1)
    page = (DOCS / "tensor-parallelism.md").read_text()
    for seconds, moved in (
        (split.data_seconds, split.data_moved_bytes),
        (split.tensor_seconds, split.tensor_moved_bytes),
        (split.seconds, split.moved_bytes),
    ):
        assert f"| {seconds:.4f} | {moved / 1e6:.0f} |" in page
    assert [split.splits[name] for name in split.splits if "Linear" in name] == [
        "row",
        "column",
        "row",
    ]


# Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3).

MEGATRON = {
    "norm1": "any",
    "qkv": "column",
    "attention": "any",
    "projection": "row",
    "add1": "any",
    "norm2": "any",
    "fc1": "column",
    "gelu": "any",
    "fc2": "row",
    "add2": "any",
}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("hidden", "length", "rows", "num_microbatches"),
    [
        pytest.param(4096, 512, 8, 1, id="weights are big against activations"),
        pytest.param(4096, 2048, 1, 8, id="one row cannot be divided"),
    ],
)
def test_a_transformer_pairs_columns_with_rows(ranks, hidden, length, rows, num_microbatches):
    graph = transformer(hidden, length, rows, num_blocks=2)
    split = split_layers(graph, ranks, NVLINK, num_microbatches=num_microbatches)
    for block in "01":
        assert {name: split.splits[f"{block}.{name}"] for name in MEGATRON} == MEGATRON
        assert split.layouts[f"{block}.qkv"] == split.layouts[f"{block}.attention"] == "features"
        assert split.layouts[f"{block}.gelu"] == "features"
        assert split.layouts[f"{block}.add2"] == "whole"
    assert split.exact
    assert split.seconds < split.data_seconds


def test_one_block_of_it_sums_twice_forward_and_twice_backward():
    hidden, length, ranks = 4096, 2048, 4
    blocks = [transformer(hidden, length, 1, num_blocks=count) for count in (1, 2)]
    one, two = (split_layers(graph, ranks, NVLINK, num_microbatches=3) for graph in blocks)
    value = 4 * hidden * length
    # An all-reduce moves 2(t-1)/t of a value over each of t links; section 3 has four a layer.
    assert two.moved_bytes - one.moved_bytes == 3 * 4 * 2 * (ranks - 1) * value


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_small_transformer_with_many_rows_is_left_to_data_parallelism(ranks):
    graph = transformer(1024, 512, 8)
    split = split_layers(graph, ranks, ETHERNET, num_microbatches=8)
    assert splits_of_kind(split, graph, "Linear") == {"data"}
    assert split.seconds == split.data_seconds


# What a choice costs.


def test_pure_data_parallelism_sums_every_gradient_once():
    graph = graph_of(layer("a"), layer("b", "Mystery"), layer("c", "ReLU", parameter_bytes=0))
    split = split_layers(graph, 4, Link(bytes_per_second=1e3), num_microbatches=5)
    assert split.data_moved_bytes == 2 * 3 * (8000 + 8000)
    assert split.data_seconds == pytest.approx(5 * 9 / 4 + 2 * 2 * 3 / 4 * 8)


def test_a_copy_that_somebody_had_made_is_not_paid_for_twice():
    """Three column layers read one value: it is gathered once, its gradients are summed once."""
    head = layer("head", "Mystery", output_bytes=8, parameter_bytes=8)
    big = {"parameter_bytes": 10**9, "output_bytes": 4000}
    readers = [layer(f"r{index}", inputs=("head",), **big) for index in range(3)]
    moved = []
    for count in (1, 3):
        names = tuple(f"r{index}" for index in range(count))
        tail = layer("sum", "Add", inputs=names, output_bytes=4, parameter_bytes=0)
        graph = graph_of(head, *readers[:count], tail)
        split = split_layers(graph, 2, Link(bytes_per_second=1e3), num_microbatches=1)
        assert {split.splits[name] for name in names} == {"column"}
        moved.append(split.moved_bytes)
    assert moved[0] == moved[1]


def test_bytes_are_those_of_one_device():
    costs = {
        "parameter_bytes": 10**9,
        "optimizer_bytes": 2 * 10**9,
        "buffer_bytes": 400,
        "activation_bytes": 160,
        "held_input_bytes": 16,
        "weight_kept_bytes": 240,
        "workspace_bytes": 24,
        "split_seconds": 0.4,
        "recompute_seconds": 0.8,
        "update_seconds": 8.0,
    }
    graph = graph_of(
        layer("norm", "Mystery", parameter_bytes=0, activation_bytes=80, output_bytes=80),
        layer("up", output_bytes=320, **costs),
        layer("act", "ReLU", parameter_bytes=0, activation_bytes=320, output_bytes=320),
        layer("down", output_bytes=80, **{**costs, "activation_bytes": 320}),
    )
    split = split_layers(graph, 4, NVLINK, num_microbatches=1)
    assert split.splits == {"norm": "data", "up": "column", "act": "any", "down": "row"}
    norm, up, act, down = split.graph.layers
    assert (norm.output_bytes, norm.activation_bytes) == (20, 20)
    assert (up.parameter_bytes, up.optimizer_bytes, up.buffer_bytes) == (25e7, 5e8, 100)
    assert (up.activation_bytes, up.held_input_bytes, up.output_bytes) == (160, 16, 80)
    assert (up.weight_kept_bytes, up.workspace_bytes) == (240, 24)
    assert (act.activation_bytes, act.output_bytes) == (80, 80)
    assert (down.activation_bytes, down.held_input_bytes, down.output_bytes) == (80, 4, 20)
    assert (up.update_seconds, up.split_seconds) == (2.0, 0.1)
    # Whoever runs a forward again talks again.
    assert up.recompute_seconds - 0.2 == pytest.approx(up.forward_seconds - 0.25)
    assert up.forward_seconds > 0.25
    assert up.backward_weight_seconds == 0.25


def test_what_waits_for_weight_gradients_is_held_like_the_larger_of_both_ends():
    graph = transformer(4096, 2048, 1)
    layers = tuple(replace(layer, weight_kept_bytes=80) for layer in graph.layers)
    split = split_layers(replace(graph, layers=layers), 4, NVLINK, num_microbatches=1)
    kept = {layer.name: layer.weight_kept_bytes for layer in split.graph.layers}
    assert kept["0.gelu"] == 20
    assert split.layouts["0.fc2"] == "whole"
    assert kept["0.fc2"] == 80


def test_rows_divide_activations_but_not_parameters():
    graph = graph_of(layer("a", "Mystery", activation_bytes=800, optimizer_bytes=160))
    graph = LayerGraph(layers=graph.layers, microbatch_size=8, input_bytes=400)
    split = split_layers(graph, 4, NVLINK, num_microbatches=1)
    (seen,) = split.graph.layers
    assert split.graph.input_bytes == 100
    assert split.splits == {"a": "data"}
    assert (seen.parameter_bytes, seen.optimizer_bytes) == (8000, 160)
    assert (seen.activation_bytes, seen.output_bytes) == (200, 2000)
    assert seen.update_seconds == DeviceRing(4, NVLINK, 8).all_reduce(8000).seconds


def test_what_a_collective_brings_is_kept_by_the_layer_that_needs_it():
    graph = graph_of(
        layer("a", "Mystery", output_bytes=80, parameter_bytes=8),
        layer("b", parameter_bytes=10**9, activation_bytes=0, output_bytes=4),
    )
    split = split_layers(graph, 2, NVLINK, num_microbatches=1)
    assert split.splits == {"a": "data", "b": "column"}
    assert split.graph.layers[1].activation_bytes == 80


def test_one_rank_leaves_the_graph_alone():
    graph = transformer(64, 16, 4)
    split = split_layers(graph, 1, ETHERNET, num_microbatches=2)
    assert split.graph is graph
    assert split.splits == {} == split.layouts
    assert split.moved_bytes == split.data_moved_bytes == split.tensor_moved_bytes == 0
    assert split.seconds == split.data_seconds == split.tensor_seconds


def test_only_the_planned_microbatch_size_is_left():
    small, big = (graph_of(layer("a"), rows=rows) for rows in (4, 8))
    both = LayerGraph(layers=small.layers, microbatch_size=4, other_sizes=(big,))
    split = split_layers(both, 2, NVLINK, num_microbatches=1)
    assert split.graph.sizes == (4,)
    assert split.graph.fingerprint == both.fingerprint


# Which layers can be divided.


def test_a_layer_that_only_loads_the_input_can_do_so_everywhere():
    costs = {"forward_seconds": 0.0, "backward_input_seconds": 0.0, "backward_weight_seconds": 0.0}
    source = layer("tokens", "Input0", output_bytes=10**6, parameter_bytes=0, **costs)
    table = layer("table", "Embedding", parameter_bytes=10**9, output_bytes=4)
    split = split_layers(graph_of(source, table), 2, NVLINK, num_microbatches=1)
    assert split.splits["table"] in ("column", "row")
    assert split.moved_bytes < 100


def test_tied_weights_and_skips_and_groups_are_not_divided():
    whole = layer("a", parameter_bytes=10**9)
    assert {way.split for way in ways(whole)} == {"data", "any", "column", "row"}
    for other in (
        layer("a", shared_parameters={"w": 10**9}),
        layer("a", skip_bytes={"b": 4}),
        layer("a", "Conv2d(8, 8, kernel_size=(3, 3), groups=8)"),
        layer("a", "LayerNorm"),
    ):
        assert {way.split for way in ways(other)} == {"data", "any"}


def test_normalised_channels_take_their_parameters_along():
    norm = layer("norm", "BatchNorm2d(64, eps=1e-05)", parameter_bytes=512)
    by_channel = next(way for way in ways(norm) if way.reads == "features")
    assert (by_channel.split, by_channel.gives, by_channel.divides) == (
        "any",
        "features",
        "features",
    )


def test_a_skip_is_brought_to_where_it_is_read():
    def split_with(skip_bytes):
        skip = {"last": skip_bytes} if skip_bytes else {}
        graph = graph_of(
            layer("first", "Stash", skip_bytes=skip, forward_seconds=1e6, output_bytes=4),
            layer("last", "Pop", parameter_bytes=10**12, output_bytes=4),
        )
        return split_layers(graph, 2, Link(bytes_per_second=1e6), num_microbatches=1)

    without, with_skip = split_with(0), split_with(1000)
    assert with_skip.layouts == without.layouts == {"first": "rows", "last": "whole"}
    # Gathered in the forward; of its gradient everyone has the part that it needs.
    assert with_skip.moved_bytes == without.moved_bytes + 1000
    assert with_skip.graph.layers[0].skip_bytes == {"last": 500}


def test_a_gradient_travels_only_to_parameters():
    """All parameters are at most one skip away from the last layer, or there are none."""
    free = {"parameter_bytes": 0, "forward_seconds": 1e6, "output_bytes": 1000}

    def moved_bytes(*head):
        last = layer("last", parameter_bytes=10**12, output_bytes=10**6)
        # Nothing has to be done about its output.
        tail = layer("tail", "ReLU", parameter_bytes=0, output_bytes=0)
        split = split_layers(
            graph_of(*head, last, tail), 2, Link(bytes_per_second=1e6), num_microbatches=1
        )
        assert split.layouts[head[-1].name] == "rows"
        assert split.splits["last"] == "column"
        return split.moved_bytes

    assert moved_bytes(layer("head", "Mystery", **free)) == 1000
    stash = layer("stash", "Mystery", skip_bytes={"head": 8}, **(free | {"parameter_bytes": 8}))
    head = layer("head", "Mystery", inputs=(), **free)
    assert moved_bytes(stash, head) == 1000 + 1000 + 2 * 8


def test_what_was_left_out_is_said():
    readers = [layer(f"r{index}", inputs=(), output_bytes=8 + index) for index in range(12)]
    names = tuple(reader.name for reader in readers)
    graph = graph_of(*readers, layer("join", "Mystery", inputs=names))
    split = split_layers(graph, 2, ETHERNET, num_microbatches=1)
    assert not split.exact
    assert split.seconds <= min(split.data_seconds, split.tensor_seconds)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2"])
def test_impossible_counts_are_refused(count):
    graph = graph_of(layer("a"))
    with pytest.raises(InputError, match="num_tensor_ranks"):
        split_layers(graph, count, NVLINK, num_microbatches=1)
    with pytest.raises(InputError, match="num_microbatches"):
        split_layers(graph, 2, NVLINK, num_microbatches=count)
