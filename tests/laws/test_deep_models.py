"""Models of more layers than the exact search cuts between: a plan or a refusal, and what was asked
for is kept."""

from __future__ import annotations

import re
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock import LayerGraph, plan
from penstock.base.errors import InputError, PlanError
from penstock.planning.planner import task as tasks
from penstock.planning.planner.task import Task
from tests.kit.planning import chain, clusters, devices, graphs, layers

FEW = 6
"""Places to cut in these tests, so that few layers are many."""


def few_places():
    return mock.patch.object(tasks, "_MOST_PLACES", FEW)


@st.composite
def deep_graphs(draw):
    """Chains of a few kinds of layers, some of which may have everything."""
    kinds = draw(st.lists(layers, min_size=1, max_size=4))
    numbers = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=9, max_size=14))
    graph = draw(graphs(most=1))
    own = (replace(kinds[kind], name=f"layer{index}") for index, kind in enumerate(numbers))
    return replace(graph, layers=tuple(own))


ROOM = st.integers(20_000, 60_000)
"""Bytes that are too little for most of these models on one device, and enough on three."""
LIMITS = st.one_of(st.just(0), ROOM)
REQUESTS = st.fixed_dictionaries(
    {"microbatches": st.integers(1, 2)},
    optional={
        "memory_bytes": ROOM,
        "stages": st.integers(1, 2),
        "replicas": st.sampled_from(["1-1", "2", "any"]),
        "asynchronous": st.booleans(),
        "recompute": st.sampled_from(["never", "stage", "layers"]),
        "layer_order": st.just("any"),
        "cuts": st.lists(st.integers(1, 8), min_size=1, max_size=2, unique=True).map(sorted),
    },
)


@settings(max_examples=12)
@given(deep_graphs(), clusters(most=2, shared=LIMITS, memories=LIMITS), REQUESTS)
def test_a_deep_model_has_a_plan_that_keeps_the_request_or_a_refusal(graph, cluster, request):
    with few_places():
        assert len(Task(graph, cluster, 1).places) < len(graph.layers)
        try:
            found = plan(graph, cluster, **request)
        except (PlanError, InputError) as error:
            # Contradictions, such as three stages with two replicas, are refused as such.
            assert isinstance(error, PlanError) or {"replicas", "cuts"} & set(request)
            return
    names = [layer.name for layer in graph.layers]
    assert sorted(name for stage in found.stages for name in stage.layers) == sorted(names)
    if "cuts" in request:
        begins = [stage.layers[0] for stage in found.stages]
        assert begins == [names[0], *(names[cut] for cut in request["cuts"])]
    else:
        assert "places, then at all near the best" in found.reason
    for device, held in zip(found.devices, found.rank_bytes, strict=True):
        assert held <= (device.memory_bytes or held)
        assert held <= request.get("memory_bytes", held)


def test_a_cut_that_is_asked_for_in_a_model_of_many_layers_is_kept():
    deep = chain(400, 0.001)
    cut = min({*range(100, 200)} - {*Task(deep, devices(2), 1).places})
    cluster = devices(2, memory_bytes=8 * 1024 * 1024)
    found = plan(deep, cluster, microbatches=2, cuts=[cut])
    assert [len(stage.layers) for stage in found.stages] == [cut, 400 - cut]


def alike(count):
    """Layers that each keep 1000 bytes of a microbatch, and nothing else."""
    kept = {"activation_bytes": 1000, "held_input_bytes": 0, "parameter_bytes": 0}
    return LayerGraph(layers=tuple(replace(layer, **kept) for layer in chain(count).layers))


def test_what_only_fits_between_two_places_is_found():
    """Where the first search finds no room, the cuts near the closest miss are tried, too."""
    graph, request = alike(24), {"microbatches": 1, "stages": 3, "schedule": "gpipe"}
    with few_places():
        assert not {8, 16} <= set(Task(graph, devices(3), 1).places)
        found = plan(graph, devices(3, memory_bytes=8000), recompute="never", **request)
        assert [len(stage.layers) for stage in found.stages] == [8, 8, 8]
        with pytest.raises(PlanError) as refusal:
            plan(graph, devices(3, memory_bytes=7000), recompute="never", **request)
    closest = r"closest of those cut at 6 of 23 places, then .*, 3 stages with gpipe, needs 7"
    assert re.search(closest, str(refusal.value))


def test_there_are_as_many_places_as_wanted_wherever_compute_and_memory_are():
    heavy = chain(300).layers[7]
    for light in (replace(heavy, forward_seconds=0.0, parameter_bytes=0), heavy):
        idle = replace(
            light, backward_input_seconds=0.0, backward_weight_seconds=0.0, activation_bytes=0
        )
        spread = (heavy if k == 7 else replace(idle, name=f"layer{k}") for k in range(300))
        task = Task(LayerGraph(layers=tuple(spread)), devices(200), 1)
        assert len(task.places) == 301
        task = Task(task.graph, devices(3), 1, marks=(0, 150, 151, 300))
        assert {0, 8, 150, 151, 300} <= set(task.places)
        assert 256 <= len(task.places) <= 260
