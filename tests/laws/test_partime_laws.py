"""Laws of PARTIME, whose frames learn through the newest activations."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as pk
from penstock import Costs, Kind, Sizes, Timeline, check, schedules, simulate, versions
from penstock.base.errors import InputError, PenstockError
from penstock.core.schedule.lower import add_communication, add_free, add_updates
from penstock.core.schedule.memory import changes, peaks
from penstock.core.schedule.rounds import Rounds, Windows, warm_up
from penstock.core.versions import USUAL, Place, Sideways


def partime(num_ranks, num_frames):
    return schedules.build("partime", num_ranks=num_ranks, num_microbatches=num_frames)


@given(st.integers(1, 6), st.integers(1, 30))
def test_a_backward_stands_behind_the_forward_that_it_goes_through(p, length):
    """Frame k − 2(p−1−s) goes back through the graph of frame k, which is the newest."""
    schedule = partime(p, length)
    check(schedule)
    for stage, ops in enumerate(schedule.ranks):
        newest = None
        for op in ops:
            if op.kind is Kind.FORWARD:
                newest = op.microbatch
            else:
                lag = 2 * (p - 1 - stage)
                assert newest == min(op.microbatch + lag, length - 1)


@given(st.integers(1, 5), st.lists(st.integers(1, 3), min_size=1, max_size=16), st.booleans())
@settings(max_examples=40)
def test_segments_end_to_end_are_the_schedule_of_the_stream(p, sizes, ends_with_the_last):
    ones = (1,) * p

    def lower(length, rounds):
        return add_communication(add_updates(partime(p, length), rounds))

    windows = Windows(lower, ones, by_minibatch=False, ahead=2)
    assert windows.num_in_flight == 2 * p - 1
    whole = lower(sum(sizes), Rounds(ones))
    starts = [0, *accumulate(sizes)]
    fed: list[list] = [[] for _ in whole.ranks]
    for index in range(len(sizes) + (not ends_with_the_last)):
        last = index == len(sizes) - ends_with_the_last
        segment, start = windows.segment(sizes[: index + 1], num_before=index, last=last)
        for own, ops in zip(fed, segment.ranks, strict=True):
            own += [op._replace(microbatch=op.microbatch + starts[start]) for op in ops]
    assert tuple(map(tuple, fed)) == whole.ranks


@pytest.mark.parametrize("p", [2, 4, 8])
def test_windows_need_not_know_more_than_is_in_flight(p):
    """A stream of any length costs the same few windows: each begins 2p−1 frames back."""
    windows = Windows(
        lambda length, rounds: add_updates(partime(p, length), rounds),
        (1,) * p, by_minibatch=False, ahead=2,
    )  # fmt: skip
    segment, start = windows.segment([1] * 100, num_before=99, last=False)
    assert start == 99 - (2 * p - 1)
    for stage, ops in enumerate(segment.ranks):
        kinds = [(op.kind, op.microbatch + start) for op in ops]
        old = 99 - 2 * (p - 1 - stage)
        assert kinds == [(Kind.FORWARD, 99), (Kind.BACKWARD, old), (Kind.UPDATE, old)]


@given(st.integers(1, 6), st.integers(0, 10))
def test_one_version_is_held_and_a_gradient_is_two_frames_old_per_stage_that_follows(p, extra):
    """Forward and backward read the same weights; frame k's gradient is applied 2(p−1−s) updates
    behind the version that its forward read."""
    ones, policy, length = (1,) * p, Sideways(), 4 * p + extra
    stream = add_updates(partime(p, length), Rounds(ones))
    read = versions.versions_read(stream, policy, Rounds(ones))
    delays = simulate(stream).with_versions(read).delays
    for s, ops in enumerate(stream.ranks):
        lag = 2 * (p - 1 - s)
        place = versions.place_of(policy, ones, s, 1)
        assert place == Place(s, p, lag) and place.warm_up == warm_up(ones, s, ahead=2)
        assert policy.delay(place) == lag == delays[s][length - 1]
        assert versions.trace(ops, policy, Rounds(ones), p).held[s] == policy.versions_held(place)
        of_forward = {
            op.microbatch: version
            for op, version in zip(ops, read[s], strict=True)
            if op.kind is Kind.FORWARD
        }
        for op, version in zip(ops, read[s], strict=True):
            if op.kind is Kind.BACKWARD and op.microbatch + lag < length:
                assert version == of_forward[op.microbatch + lag] == op.microbatch


@pytest.mark.parametrize("name", schedules.names())
def test_a_schedule_goes_through_the_activations_that_its_policy_says(name):
    schedule = schedules.build(name, num_ranks=2, num_microbatches=4)
    policy = USUAL.get(name, versions.Flush())
    assert schedule.activations == policy.activations == simulate(schedule).activations


numbers = st.integers(1, 9)


@given(st.integers(1, 6), st.integers(1, 30), st.data())
def test_one_graph_is_held_on_every_rank(p, length, data):
    sizes = Sizes([data.draw(numbers) for _ in range(p)])
    timeline = simulate(add_updates(add_free(partime(p, length)), Rounds((1,) * p)), Costs(hop=0.5))
    assert timeline.peak_activations == (1.0,) * p
    assert timeline.peak_bytes(sizes) == sizes.activation
    for curve, held in zip(timeline.held(sizes), sizes.activation, strict=True):
        assert {amount for _, amount in curve} == {0.0, held}
    again = Timeline.from_json(timeline.to_json())
    assert again.peak_activations == (1.0,) * p and again.activations == "newest"


def test_long_streams_hold_no_more():
    schedule = partime(2, 10_000)
    assert simulate(schedule).peak_activations == (1.0, 1.0)
    assert peaks(schedule.rank_ops, Sizes([3, 4]), activations="newest") == (3, 4)


def test_a_rank_with_two_stages_keeps_a_graph_of_each():
    schedule = pk.Schedule.parse("0F0,1F0,1B0,0F1,1F1,1B1,0B0,0B1")
    assert peaks(schedule.ranks, Sizes([3, 4]), activations="newest") == (7,)
    assert peaks(schedule.ranks, Sizes([3, 4])) == (10,)
    _, steps = changes(schedule.ranks[0], Sizes([3, 4]), 1, "newest")
    assert steps.tolist() == [3, 4, -4, 0, 4, -4, -3, 0]


def graph_of(num_layers, **layer):
    seconds = dict.fromkeys(
        ("forward_seconds", "backward_input_seconds", "backward_weight_seconds"), 0.01
    )
    layers = (pk.Layer(name=f"layer{index}", **seconds | layer) for index in range(num_layers))
    return pk.LayerGraph(layers=tuple(layers))


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_plan_books_one_graph_and_one_version_per_stage(num_stages):
    graph = graph_of(num_stages, activation_bytes=1000, parameter_bytes=10)
    cluster = pk.Cluster.local(num_stages)
    plan = pk.plan(graph, cluster, microbatches=1, stages=num_stages, versions=Sideways())
    assert (plan.schedule, plan.versions) == ("partime", Sideways())
    assert plan.rank_bytes == (1020,) * num_stages
    assert [stage.memory_bytes for stage in plan.stages] == [1020] * num_stages
    assert plan.simulate().peak_bytes(plan.sizes) == (1000,) * num_stages
    stashing = pk.plan(graph, cluster, microbatches=1, stages=num_stages, schedule="pipedream")
    # Stage s keeps p−s graphs and p−s versions, besides a gradient of the weights.
    held = range(num_stages, 0, -1)
    assert stashing.rank_bytes == tuple(1000 * more + 10 * (more + 1) for more in held)


REFUSED = {
    "partime has no replicas; take 1f1b": {"schedule": "partime", "replicas": "2-2"},
    "no other weights to read; leave versions out, or take stash with the schedule pipedream": {
        "schedule": "partime", "versions": versions.Stash(),
    },
    "no other weights to read; leave versions out, or take flush with the schedule 1f1b": {
        "schedule": "partime", "versions": versions.Flush(),
    },
    "the policy sideways is for the schedule partime, but the plan's is 1f1b": {
        "schedule": "1f1b", "versions": Sideways(),
    },
    "partime has no replicas": {"schedule": "partime", "replicas": "any"},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused(message):
    with pytest.raises(PenstockError, match=message):
        pk.plan(graph_of(4), pk.Cluster.local(4), microbatches=1, **REFUSED[message])


def test_a_stage_does_not_run_forward_twice_for_what_it_has_just_left():
    plan = pk.plan(graph_of(4), pk.Cluster.local(2), stages=2, schedule="partime")
    assert plan.recomputing("layers").stages[0].recompute == "layers"
    with pytest.raises(InputError, match="stage 0 is to run forward twice, but partime goes back"):
        plan.recomputing("stage")


def test_frames_are_not_summed():
    with pytest.raises(InputError, match="updates after each frame; leave updates out"):
        Sideways(updates="minibatch")
