"""PipeDream-2BW's planner against its formulas, worked out again here."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from msgspec.structs import replace

from penstock.cluster import Cluster, Device, Link
from penstock.errors import InputError
from penstock.graph import Layer, LayerGraph
from penstock.partition import balance, width_depth


def random_graph(draw, num_layers, size=1):
    return LayerGraph(
        microbatch_size=size,
        input_bytes=draw.randint(1, 50),
        layers=tuple(
            Layer(
                name=f"layer{at}",
                forward_seconds=draw.uniform(0.1, 2),
                backward_input_seconds=draw.uniform(0.1, 2),
                backward_weight_seconds=draw.uniform(0.1, 2),
                activation_bytes=draw.randint(0, 90),
                output_bytes=draw.randint(0, 60),
                parameter_bytes=draw.randint(0, 700),
            )
            for at in range(num_layers)
        ),
    )


def blocks(num_layers, size=1, forward=1.0):
    """Equal layers whose backward takes two forwards."""
    layer = Layer(
        name="",
        forward_seconds=forward,
        backward_input_seconds=forward,
        backward_weight_seconds=forward,
        activation_bytes=30 * size,
        output_bytes=5 * size,
        parameter_bytes=100,
    )
    layers = tuple(replace(layer, name=f"block{at}") for at in range(num_layers))
    return LayerGraph(layers=layers, microbatch_size=size, input_bytes=5 * size)


def by_hand(graph, cluster, rows, limit):
    """{(w, d, recompute): (t, memory)} of a flat cluster, straight from the paper's formulas."""
    found = {}
    num_devices, link = len(cluster.devices), cluster.link
    for width in range(1, num_devices + 1):
        for depth in range(1, num_devices + 1):
            m = rows / (width * graph.microbatch_size)
            if width * depth > num_devices or depth > min(len(graph.layers), m) or m % 1:
                continue
            for recompute in (False, True):
                times = [
                    one.compute_seconds + (one.forward_seconds if recompute else 0)
                    for one in graph.layers
                ]
                cuts = balance(times, depth)
                beats, needs = [], []
                for start, stop in pairwise(cuts):
                    own = graph.layers[start:stop]
                    weights = sum(one.parameter_bytes for one in own)
                    kept = sum(one.activation_bytes for one in own)
                    given = graph.crossing_bytes[start - 1] if start else graph.input_bytes
                    messages = [graph.crossing_bytes[at - 1] for at in (start, stop)
                                if 0 < at < len(graph.layers)]  # fmt: skip
                    received = sum(map(link.seconds, messages))
                    exchange = 2 * (width - 1) / width * weights / link.bytes_per_second
                    beats.append(max(sum(times[start:stop]) + received, exchange / m))
                    held = kept if recompute else depth * kept
                    needs.append(2 * weights + held + depth * given)
                found[width, depth, recompute] = (max(beats), max(needs), max(needs) - limit)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_equals_the_formulas(seed):
    draw = random.Random(seed)
    graph = random_graph(draw, draw.randint(1, 7), draw.choice([1, 2]))
    devices = tuple(Device(name=f"d{at}") for at in range(draw.randint(1, 6)))
    cluster = Cluster(devices=devices, link=Link(bytes_per_second=draw.choice([20.0, 500.0])))
    rows, limit = draw.choice([4, 12, 24]), draw.choice([200, 800])
    expected = by_hand(graph, cluster, rows, limit)
    found = width_depth(graph, cluster, rows, limit)
    assert len(found) == len(expected)
    for one in found:
        beat, memory, over = expected[one.width, one.depth, one.recompute]
        assert one.pipe_seconds == pytest.approx(beat)
        assert one.memory_bytes == pytest.approx(memory)
        assert one.over_bytes == pytest.approx(over)
        assert one.is_feasible == (over <= 0)
    times = [one.minibatch_seconds for one in found]
    assert times == sorted(times)


def test_of_equal_blocks_the_papers_printed_formulas_come_out():
    graph, cluster = blocks(8), Cluster.tree((4,), (Link(),))
    depth, rows = 4, 16
    weights, kept, given = 8 * 100, 8 * 30, 5
    whole = {one.recompute: one for one in width_depth(graph, cluster, rows) if one.depth == depth}
    assert whole[False].memory_bytes == 2 * weights / depth + depth * kept / depth + depth * given
    assert whole[True].memory_bytes == 2 * weights / depth + kept / depth + depth * given
    assert whole[True].pipe_seconds == pytest.approx(4 / 3 * whole[False].pipe_seconds)
    (gpipe,) = [
        one for one in width_depth(graph, cluster, rows, weights="gpipe") if one.depth == depth
    ]
    assert gpipe.memory_bytes == weights / depth + kept / depth + rows * given
    assert gpipe.recompute
    assert gpipe.minibatch_seconds == pytest.approx((rows + depth - 1) * 2 * 4)


def test_every_profiled_size_is_tried_and_a_larger_one_can_win():
    small = blocks(4)
    large = blocks(4, size=4, forward=2.0)  # four rows for the time of two
    graph = replace(small, other_sizes=(large,))
    found = width_depth(graph, Cluster.tree((2,), (Link(),)), 16)
    assert {one.microbatch_size for one in found} == {1, 4}
    assert found[0].microbatch_size == 4
    assert all(one.num_microbatches * one.width * one.microbatch_size == 16 for one in found)


def test_memory_decides_between_recomputing_and_not():
    graph, cluster = blocks(8), Cluster.tree((2,), (Link(),))
    free = width_depth(graph, cluster, 8)
    assert not free[0].recompute
    assert all(one.is_feasible for one in free)
    tight = width_depth(graph, cluster, 8, memory_bytes=990)
    fitting = [one for one in tight if one.is_feasible]
    assert [(one.width, one.depth, one.recompute) for one in fitting] == [(1, 2, True)]
    assert all(one.over_bytes == one.memory_bytes - 990 for one in tight)


def test_a_devices_own_memory_and_speed_count():
    devices = (Device(name="fast", speed=2.0), Device(name="small", memory_bytes=500))
    found = width_depth(blocks(6), Cluster(devices=devices), 8)
    deep = next(one for one in found if one.depth == 2 and not one.recompute)
    assert deep.cuts == (0, 4, 6)
    assert deep.pipe_seconds == pytest.approx(6.0)
    assert deep.over_bytes == 2 * 200 + 2 * 60 + 2 * 5 - 500
    wide = next(one for one in found if one.width == 2 and not one.recompute)
    assert wide.pipe_seconds == pytest.approx(18.0)


def test_slow_links_between_servers_count_for_the_exchange_and_the_messages():
    fast, slow = Link(bytes_per_second=1e9), Link(bytes_per_second=10.0)
    found = width_depth(blocks(2), Cluster.tree((2, 2), (fast, slow)), 8)
    by_shape = {(one.width, one.depth): one for one in found if not one.recompute}
    assert by_shape[4, 1].pipe_seconds == pytest.approx(max(6, 2 * 3 / 4 * 200 / 10 / 2))
    # Replicas of a stage stay in a server; messages cross.
    assert by_shape[2, 2].pipe_seconds == pytest.approx(3 + 5 / 10)


def test_what_cannot_run_is_left_out_and_nonsense_refused():
    found = width_depth(blocks(8), Cluster.tree((8,), (Link(),)), 3)
    assert {(one.width, one.depth) for one in found} == {(1, 1), (1, 2), (1, 3), (3, 1)}
    with pytest.raises(InputError, match="minibatch_rows is 0"):
        width_depth(blocks(2), Cluster.tree((2,), (Link(),)), 0)
    with pytest.raises(InputError, match="weights"):
        width_depth(blocks(2), Cluster.tree((2,), (Link(),)), 4, weights="3bw")
