"""No way to share layers beats the search's; a group never costs more than what it could do."""

from __future__ import annotations

from itertools import product
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.cluster import Link
from penstock.core.graph import Layer, LayerGraph
from penstock.planning.partition import tensor_layouts
from penstock.planning.partition.tensor import split_layers
from tests.kit.examples import examples
from tests.kit.helpers import amounts

KINDS = ("Linear", "ReLU", "LayerNorm", "BatchNorm2d", "Embedding", "Conv2d", "Add")
# How a layer can be done, written down a second time: (layout it reads, layout it gives, how the
# gradient of its input comes out, what is divided, whether its terms must be added up).
EVERY = [("R", "R", "R", "R", False), ("W", "W", "W", "W", False)]
COLUMN = [("W", "F", "P", "F", False)]
ROW = [("F", to, "F", "F", True) for to in "WRF"]
LOOK_UP = [("W", to, "W", "F", True) for to in "WRF"]
ALONG = [("F", "F", "F", "F", False)]
WAYS = {
    "Linear": EVERY + COLUMN + ROW,
    "Conv2d": EVERY + COLUMN + ROW,
    "Embedding": EVERY + COLUMN + LOOK_UP,
    "BatchNorm2d": EVERY + ALONG,
    "LayerNorm": EVERY,
    "ReLU": EVERY + ALONG,
    "Add": EVERY + ALONG,
}
NO_PARAMETERS = ("ReLU", "Add")


@st.composite
def layers(draw, index, inputs=None):
    kind = draw(st.sampled_from(KINDS))
    seconds = st.integers(0, 20).map(float)
    return Layer(
        name=f"layer{index}",
        kind=kind,
        forward_seconds=draw(seconds),
        backward_input_seconds=draw(seconds),
        backward_weight_seconds=draw(seconds),
        update_seconds=draw(seconds),
        output_bytes=draw(st.integers(0, 60)),
        parameter_bytes=0 if kind in NO_PARAMETERS else draw(st.integers(1, 200)),
        inputs=inputs,
    )


@st.composite
def graphs(draw, most, least=1, branching=False):
    made = []
    for index in range(draw(st.integers(least, most))):
        names = tuple(layer.name for layer in made)
        inputs = None
        if branching and names:
            inputs = draw(st.lists(st.sampled_from(names), max_size=2, unique=True).map(tuple))
        made.append(draw(layers(index, inputs)))
    return LayerGraph(layers=tuple(made), microbatch_size=draw(st.integers(1, 9)))


links = st.builds(
    Link,
    latency_seconds=st.sampled_from([0.0, 0.5, 3.0]),
    bytes_per_second=st.sampled_from([0.0, 1.0, 7.0, 100.0]),
)
ranks = st.integers(2, 5)
minibatches = st.integers(1, 4)


class Group:
    """The costs of the laws, kept apart from those of the search."""

    def __init__(self, graph, num_ranks, link, num_microbatches):
        self.graph, self.t, self.link, self.m = graph, num_ranks, link, num_microbatches
        rows = graph.microbatch_size
        self.part = {"R": ceil(rows / num_ranks) / rows, "F": 1 / num_ranks, "W": 1.0}
        place = {layer.name: index for index, layer in enumerate(graph.layers)}
        self.sources = [
            ([index - 1] if index else [])
            if layer.inputs is None
            else [place[name] for name in layer.inputs]
            for index, layer in enumerate(graph.layers)
        ]
        self.trains = []
        for index, layer in enumerate(graph.layers):
            before = any(self.trains[source] for source in self.sources[index])
            self.trains.append(bool(layer.parameter_bytes) or before)

    def rounds(self, count, num_bytes):
        speed = self.link.bytes_per_second
        return count * self.link.latency_seconds + (num_bytes / speed if speed else 0.0)

    def change(self, have, want, size):
        t = self.t
        if have in (want, "W") or size == 0:
            return 0.0
        if have + want == "PW":
            return self.rounds(2 * (t - 1), 2 * (t - 1) / t * size)
        if {have, want} == {"R", "F"}:
            return self.rounds(t - 1, (t - 1) / t * self.part["R"] * size)
        parted = want if have == "P" else have
        return self.rounds(t - 1, min((t - 1) * self.part[parted], 1) * size)

    def seconds(self, ways):
        talk = work = 0.0
        for index, (layer, way) in enumerate(zip(self.graph.layers, ways, strict=True)):
            _, gives, _, divided, adds_up = way
            size, share = layer.output_bytes, self.part[divided]
            work += self.m * layer.compute_seconds * share
            work += layer.update_seconds * (1 / self.t if divided == "F" else 1)
            if divided == "R" and layer.parameter_bytes:
                work += self.change("P", "W", layer.parameter_bytes)
            if adds_up:
                talk += self.change("P", gives, size) + self.change(gives, "W", size)
            readers = [one for one, found in enumerate(self.sources) if index in found]
            talk += self.handing_on(index, gives, [ways[one] for one in readers])
        return work + self.m * talk

    def handing_on(self, index, gives, readers):
        size, trains = self.graph.layers[index].output_bytes, self.trains[index]
        if not readers:
            there_and_back = [
                self.change(gives, place, size) + trains * self.change(place, gives, size)
                for place in "RW"
            ]
            return 0.0 if gives in "RW" else min(there_and_back)
        total, copies, gradients = 0.0, [gives], set()
        for reads, _, returns, *_ in readers:
            total += min(self.change(copy, reads, size) for copy in copies)
            copies.append(reads)
            if trains and returns not in gradients:
                total += self.change(returns, gives, size)
                gradients.add(returns)
        return total

    def fastest(self):
        choices = [WAYS[layer.kind] for layer in self.graph.layers]
        return min(self.seconds(ways) for ways in product(*choices))


@settings(max_examples=40)
@given(graph=graphs(most=5), t=ranks, link=links, m=minibatches)
def test_no_choice_of_a_chain_is_faster(graph, t, link, m):
    split = split_layers(graph, t, link, num_microbatches=m)
    assert split.exact
    assert split.seconds == pytest.approx(Group(graph, t, link, m).fastest())


@settings(max_examples=40)
@given(graph=graphs(most=5, branching=True), t=ranks, link=links, m=minibatches)
def test_no_choice_of_a_graph_with_branches_is_faster(graph, t, link, m):
    split = split_layers(graph, t, link, num_microbatches=m)
    assert split.exact
    assert split.seconds == pytest.approx(Group(graph, t, link, m).fastest())


@settings(max_examples=2, deadline=None)
@given(graph=graphs(least=6, most=7), t=ranks, link=links)
def test_nor_is_one_of_a_longer_chain(graph, t, link):
    split = split_layers(graph, t, link, num_microbatches=2)
    assert split.seconds == pytest.approx(Group(graph, t, link, 2).fastest())


@settings(max_examples=25)
@given(graph=graphs(most=12, branching=True), t=ranks, link=links, m=minibatches)
def test_it_is_never_slower_than_data_tensor_or_one_device(graph, t, link, m):
    split = split_layers(graph, t, link, num_microbatches=m)
    alone = split_layers(graph, 1, link, num_microbatches=m)
    assert split.seconds <= split.data_seconds
    assert split.seconds <= split.tensor_seconds
    assert split.seconds <= alone.seconds * (1 + 1e-9)
    rows = [WAYS[layer.kind][0] for layer in graph.layers]
    assert split.data_seconds == pytest.approx(Group(graph, t, link, m).seconds(rows))


@given(graph=graphs(most=8, branching=True), t=ranks, link=links, m=minibatches)
def test_nor_if_it_must_leave_nearly_everything_out(graph, t, link, m):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_layouts, "_MOST_STATES", 1)
        split = split_layers(graph, t, link, num_microbatches=m)
    assert split.seconds <= min(split.data_seconds, split.tensor_seconds)
    best = split_layers(graph, t, link, num_microbatches=m).seconds
    assert split.seconds >= best * (1 - 1e-9)
    if split.exact:
        assert split.seconds == pytest.approx(best)


@given(graph=graphs(most=12, branching=True), t=ranks, link=links, m=minibatches)
def test_the_graph_that_a_group_sees_takes_what_was_predicted(graph, t, link, m):
    split = split_layers(graph, t, link, num_microbatches=m)
    seen = split.graph.layers
    total = sum(m * layer.compute_seconds + layer.update_seconds for layer in seen)
    assert total == pytest.approx(split.seconds)
    assert set(split.splits) == set(split.layouts) == {layer.name for layer in graph.layers}
    assert split.graph.fingerprint == graph.fingerprint


@given(graph=graphs(most=12, branching=True), t=ranks, link=links, m=minibatches)
def test_all_devices_together_hold_the_model(graph, t, link, m):
    split = split_layers(graph, t, link, num_microbatches=m)
    for before, after in zip(graph.layers, split.graph.layers, strict=True):
        assert before.parameter_bytes <= t * after.parameter_bytes
        assert after.parameter_bytes <= before.parameter_bytes
        assert after.output_bytes <= before.output_bytes <= t * after.output_bytes


@examples(20)
@given(graph=graphs(most=8, branching=True), t=ranks, m=minibatches, data=st.data())
def test_a_better_link_is_never_slower(graph, t, m, data):
    speeds = sorted(data.draw(st.lists(st.floats(0.1, 1e4), min_size=2, max_size=2)))
    waits = sorted(data.draw(st.lists(amounts(10), min_size=2, max_size=2)))
    worse = Link(latency_seconds=waits[1], bytes_per_second=speeds[0])
    better = Link(latency_seconds=waits[0], bytes_per_second=speeds[1])
    slow, fast, free = (
        split_layers(graph, t, link, num_microbatches=m) for link in (worse, better, Link())
    )
    assert free.seconds <= fast.seconds * (1 + 1e-9)
    assert fast.seconds <= slow.seconds * (1 + 1e-9)


@given(graph=graphs(most=8), t=ranks)
def test_over_a_link_that_costs_nothing_all_work_is_divided_where_it_can_be(graph, t):
    split = split_layers(graph, t, Link(), num_microbatches=1)
    rows = ceil(graph.microbatch_size / t) / graph.microbatch_size
    expected = 0.0
    for layer in graph.layers:
        divisible = layer.kind != "LayerNorm"
        compute = layer.compute_seconds * (1 / t if divisible else rows)
        expected += compute + layer.update_seconds * (1 / t if divisible else 1)
    assert split.seconds == pytest.approx(expected)


@given(graph=graphs(most=8, branching=True), link=links, m=minibatches)
def test_one_rank_changes_nothing(graph, link, m):
    split = split_layers(graph, 1, link, num_microbatches=m)
    assert split.graph is graph
    assert split.moved_bytes == 0
    total = sum(m * layer.compute_seconds + layer.update_seconds for layer in graph.layers)
    assert split.seconds == pytest.approx(total)
