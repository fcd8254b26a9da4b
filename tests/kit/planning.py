"""What tests of the planner plan: chains, clusters and requests, by hand and by hypothesis."""

from __future__ import annotations

from itertools import combinations

from hypothesis import strategies as st
from msgspec.structs import replace

from penstock import Cluster, Device, Layer, LayerGraph, Link, plan
from penstock.base.errors import PlanError
from penstock.core.graph import Contention

KIB = 1024

milliseconds = st.integers(0, 50).map(lambda number: number / 1000)
sizes = st.integers(0, 1000)
layers = st.builds(
    Layer,
    name=st.just(""),
    forward_seconds=milliseconds,
    backward_input_seconds=milliseconds,
    backward_weight_seconds=milliseconds,
    split_forward_seconds=st.one_of(st.just(0.0), milliseconds),
    split_seconds=st.one_of(st.just(0.0), milliseconds),
    recompute_seconds=st.one_of(st.none(), milliseconds),
    update_seconds=milliseconds,
    activation_bytes=sizes,
    held_input_bytes=sizes,
    weight_kept_bytes=sizes,
    workspace_bytes=st.one_of(st.just(0), sizes),
    output_bytes=sizes,
    parameter_bytes=sizes,
    buffer_bytes=sizes,
    optimizer_bytes=sizes,
    unit=st.sampled_from(["", "a", "b"]),
)
factors = st.sampled_from([0.5, 1.0, 2.0])
contentions = st.builds(
    Contention, whole=factors, split=factors, stream=factors, update=factors, stream_update=factors
)
memories = st.one_of(st.just(0), st.integers(1000, 20000))
links = st.builds(
    Link,
    latency_seconds=st.one_of(st.just(0.0), milliseconds),
    bytes_per_second=st.sampled_from([0.0, 1e4, 1e5]),
)


def with_tie(graph_layers, holders, name="shared"):
    """Some layers, of which the holders share as much of their parameters as each can."""
    size = min(graph_layers[index].parameter_bytes for index in holders)
    return tuple(
        replace(layer, shared_parameters={name: size} if index in holders else {})
        for index, layer in enumerate(graph_layers)
    )


@st.composite
def graphs(draw, most=7, tied=False):
    chain = draw(st.lists(layers, min_size=1, max_size=most))
    named = tuple(replace(layer, name=f"layer{index}") for index, layer in enumerate(chain))
    if tied and len(named) > 1:
        named = with_tie(named, draw(st.sets(st.integers(0, len(named) - 1), min_size=2)))
    return LayerGraph(
        layers=named,
        input_bytes=draw(sizes),
        hop_seconds=draw(milliseconds),
        op_seconds=draw(st.sampled_from([0.0, 0.001])),
        contention=draw(contentions),
    )


@st.composite
def clusters(draw, most=4, shared=memories, memories=memories):
    devices = tuple(
        Device(
            name=f"d{index}",
            speed=draw(st.sampled_from([0.5, 1, 3])),
            memory_bytes=draw(memories),
        )
        for index in range(draw(st.integers(1, most)))
    )
    return Cluster(devices=devices, link=draw(links), memory_bytes=draw(shared))


def devices(count, **fields):
    return Cluster(devices=tuple(Device(name=f"d{index}", **fields) for index in range(count)))


def chain(count=4, seconds=0.01, **fields):
    given = {
        "activation_bytes": 8 * KIB,
        "held_input_bytes": 2 * KIB,
        "weight_kept_bytes": 5 * KIB,
        "output_bytes": 2 * KIB,
        "parameter_bytes": KIB,
        **fields,
    }
    return LayerGraph(
        layers=tuple(
            Layer(
                name=f"layer{index}",
                forward_seconds=seconds,
                backward_input_seconds=seconds,
                backward_weight_seconds=seconds,
                **given,
            )
            for index in range(count)
        )
    )


def attempt(graph, cluster, **request):
    """The plan, or ``None`` where there is none."""
    try:
        return plan(graph, cluster, **request)
    except PlanError:
        return None


def all_cuts(num_layers, num_stages):
    """Every way to cut layers into stages."""
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield (0, *inner, num_layers)


def held_bytes(found):
    """What each rank of a plan holds at its worst simulated moment, with the state of its
    stages."""
    held = list(found.simulate().peak_bytes(found.sizes))
    place = found.placement
    for index, stage in enumerate(found.stages):
        for rank in place.ranks_of(index):
            held[rank] += stage.state_bytes
    return held


def in_one_line(told):
    """What is printed of a plan, whose sentences are broken into lines of a window."""
    return " ".join(str(told).split())
