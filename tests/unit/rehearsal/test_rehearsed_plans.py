"""Plans for devices of mixed speeds on emulated devices: what is performed is what was planned."""

from __future__ import annotations

import itertools

import pytest

from penstock import Layer, LayerGraph, plan, simulate
from penstock.core.cluster import Cluster, Device, Group, Link
from penstock.core.schedule import Kind
from penstock.core.schedule.op import COMPUTE
from penstock.training.rehearsal import rehearse
from penstock.training.rehearsal.conduct import performable
from penstock.training.rehearsal.result import Steady, compute_of, stream_of
from tests.kit.examples import in_turns

SPEEDS = (1.0, 0.5, 1.0, 0.7)
SYNCHRONOUS = ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b"]


def graph():
    """Eight layers, each a little dearer than the one before."""
    layers = tuple(
        Layer(
            name=f"layer{index}",
            forward_seconds=0.002 + 0.0002 * index,
            backward_input_seconds=0.002,
            backward_weight_seconds=0.001,
            update_seconds=0.0005,
            output_bytes=1000,
            parameter_bytes=5000,
        )
        for index in range(8)
    )
    return LayerGraph(layers=layers)


def cluster():
    """Two servers of two devices: 1 ms inside a server, 3 ms between them, half of it bandwidth."""
    devices = tuple(Device(name=f"d{rank}", speed=speed) for rank, speed in enumerate(SPEEDS))
    inside = Link(latency_seconds=0.0005, bytes_per_second=2e6)
    groups = (
        Group(name="left", members=("d0", "d1"), link=inside),
        Group(name="right", members=("d2", "d3"), link=inside),
    )
    between = Link(latency_seconds=0.0015, bytes_per_second=1000 / 0.0015)
    return Cluster(devices=devices, groups=groups, link=between)


def even(schedule="1f1b", **request):
    """Two layers for each of four devices, whatever their speed, in a minibatch of 4."""
    return plan(graph(), cluster(), microbatches=4, schedule=schedule, cuts=[2, 4, 6], **request)


def test_a_device_takes_as_long_as_its_speed_says():
    made = even()
    assert sorted(device.speed for device in made.devices) == sorted(SPEEDS)
    found = rehearse(made, steps=1, transport="threads")
    forwards = [span for span in found.measured.spans if span.op.kind is Kind.FORWARD]
    assert len(forwards) == 16
    for span in forwards:
        # A rank that wakes up late takes longer, never shorter.
        cost = sum(layer.forward_seconds for layer in graph().layers[2 * span.rank :][:2])
        assert span.end - span.start >= cost / made.devices[span.rank].speed


def test_a_message_takes_as_long_as_the_link_between_its_devices():
    made = even()
    found = rehearse(made, steps=1, transport="threads")
    forwards = {
        (span.op.stage, span.op.microbatch): span
        for span in found.measured.spans
        if span.op.kind is Kind.FORWARD
    }
    servers = [device.name in ("d0", "d1") for device in made.devices]
    for border, (here, there) in enumerate(itertools.pairwise(servers)):
        for microbatch in range(4):
            left = forwards[border, microbatch].end
            hop = 0.001 if here == there else 0.003
            assert forwards[border + 1, microbatch].start >= left + hop


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_a_measured_step_is_no_shorter_than_the_planned_one(schedule):
    stages = 8 if schedule == "interleaved-1f1b" else 4
    made = plan(graph(), cluster(), microbatches=4, schedule=schedule, stages=stages)
    assert made.num_ranks == 4
    found = rehearse(made, steps=1, scale=0.5, transport="threads")
    assert found.measured.makespan >= 0.98 * 0.5 * made.step_seconds
    assert found.predicted.makespan >= 0.98 * 0.5 * made.step_seconds  # a hop takes longer here


def test_each_replica_performs_its_own_microbatches():
    made = plan(graph(), cluster(), microbatches=4, schedule="1f1b", replicas=(2, 1, 1))
    found = rehearse(made, steps=1, transport="threads")
    assert found.measured.num_ranks == 4
    assert found.measured.makespan >= 0.98 * made.step_seconds
    done = [{op for op in row.ops if op.kind in COMPUTE} for row in found.measured.rows]
    assert done == [set(ops) for ops in made.build_schedule().ranks]


@pytest.mark.parametrize(
    ("schedule", "request_"),
    in_turns(itertools.product(SYNCHRONOUS, [{}, {"recompute": "stage"}]), 3),
)
def test_all_that_a_rehearsal_adds_to_a_plan_is_free_in_the_simulator(schedule, request_):
    stages = 8 if schedule == "interleaved-1f1b" else 4
    made = plan(graph(), cluster(), microbatches=8, schedule=schedule, stages=stages, **request_)
    performed = performable(made.build_schedule())
    assert simulate(performed, made.costs).makespan == pytest.approx(made.step_seconds)


@pytest.mark.parametrize(
    ("schedule", "replicas"),
    in_turns(
        itertools.product(["pipedream", "pipedream-2bw"], [(1, 1, 1, 1), (2, 1, 1), (1, 2, 1)]), 4
    ),
)
def test_the_steady_state_of_a_rehearsed_stream_is_the_step_of_its_plan(schedule, replicas):
    made = plan(graph(), cluster(), microbatches=8, schedule=schedule, replicas=replicas)
    compute = compute_of(made)
    stream = stream_of(made, compute, None)
    performed = performable(compute, stream=stream)
    steady = Steady.of(performed, made.costs, stream.period)
    per_microbatch = steady.seconds(simulate(performed, made.costs))
    assert per_microbatch * 8 == pytest.approx(made.step_seconds, rel=0.01)
