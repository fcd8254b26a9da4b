"""Plans for a live source: the fewest devices that keep its rate, or what is missing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as pk
from penstock import versions
from penstock.base.errors import InputError, PlanError
from tests.kit.command_line import refused, run
from tests.kit.examples import examples
from tests.kit.planning import in_one_line


def graph_of(seconds, **layer):
    """A model whose layers take these seconds for a frame, forward and backward."""
    layers = (
        pk.Layer(
            name=f"layer{index}",
            forward_seconds=whole / 4,
            backward_input_seconds=whole / 4,
            backward_weight_seconds=whole / 2,
            **layer,
        )
        for index, whole in enumerate(seconds)
    )
    return pk.LayerGraph(layers=tuple(layers))


EVEN = graph_of([0.01] * 8)


def cluster_of(count, hop_seconds=0.0):
    devices = tuple(pk.Device(name=f"device{index}") for index in range(count))
    return pk.Cluster(devices=devices, link=pk.Link(latency_seconds=hop_seconds))


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(0, 8),
    st.integers(1, 20),
)
@examples(25)
def test_the_fewest_devices_are_taken(seconds, count, hop, times):
    """As planning for each number of devices says."""
    graph, cluster = graph_of([one / 100 for one in seconds]), cluster_of(count, hop / 100)
    rate = 1000 / sum(seconds) * times / 10
    most = min(count, len(seconds))
    reached = {
        stages: pk.plan(graph, cluster, schedule="partime", stages=stages).frames_per_second
        for stages in range(1, most + 1)
    }
    able = [stages for stages, frames in reached.items() if frames >= rate * (1 - 1e-9)]
    if not able:
        with pytest.raises(PlanError, match=r"no plan keeps .* frames/s: the fastest, .* gives"):
            pk.plan(graph, cluster, schedule="partime", rate=rate)
        return
    plan = pk.plan(graph, cluster, schedule="partime", rate=rate)
    assert (len(plan.stages), plan.num_microbatches) == (min(able), 1)
    assert plan.frames_per_second == pytest.approx(reached[min(able)])
    assert pk.Plan.from_json(plan.to_json()) == plan and plan.rate == rate


def test_rate_and_latency_are_told_together():
    plan = pk.plan(EVEN, cluster_of(4, hop_seconds=0.001), schedule="partime", rate=30)
    assert (plan.schedule, plan.num_ranks) == ("partime", 3)
    assert plan.frames_per_second == pytest.approx(1 / 0.03)
    light, saturated = plan.latency
    assert light == pytest.approx(0.08 / 4 + 2 * 0.001) and saturated == pytest.approx(3 * 0.03)
    told = (
        "rate: up to 33.33 frames/s (30 frames/s asked for); latency of an output: 22 ms at light "
        "load, 90 ms saturated"
    )
    assert "30 ms a frame in the steady state" in in_one_line(plan)
    assert told in in_one_line(plan)
    assert plan.reason == (
        "3 stages with partime (sideways) keeps 30 frames/s: it gives 33.33 frames/s; fewer "
        "devices are too slow, or too small"
    )
    slow = pk.plan(EVEN, cluster_of(4, hop_seconds=0.03), schedule="partime", rate=25)
    assert slow.num_ranks == 3 and "; 2 devices would give 21.43 frames/s" in slow.reason
    assert "2 devices" in [row.label for row in slow.alternatives]


def test_what_learns_best_is_proposed_where_nothing_is_asked_for():
    plan = pk.plan(EVEN, cluster_of(4), rate=30)
    assert (plan.schedule, plan.versions, plan.num_ranks) == ("pipedream", versions.Stash(), 3)
    assert plan.reason.endswith("its versions and graphs fit")


def test_newest_activations_are_proposed_where_stashing_does_not_fit_or_needs_more_devices():
    heavy = graph_of([0.01] * 8, parameter_bytes=100)
    tight = pk.plan(heavy, cluster_of(4), rate=30, memory_bytes=700)
    assert (tight.schedule, tight.num_ranks) == ("partime", 3)
    assert "needs more memory or devices" in tight.reason
    far = pk.plan(EVEN, cluster_of(4, hop_seconds=0.01), rate=30)
    assert (far.schedule, far.num_ranks) == ("partime", 3)
    with pytest.raises(PlanError, match="no plan keeps"):
        pk.plan(EVEN, cluster_of(2), rate=60)


def test_without_a_rate_the_stream_is_as_fast_as_it_can_be():
    for asked in ({"schedule": "partime"}, {"versions": versions.Sideways()}):
        plan = pk.plan(EVEN, cluster_of(4), **asked)
        assert (plan.num_ranks, plan.num_microbatches, plan.rate) == (4, 1, None)
        assert plan.frames_per_second == pytest.approx(50)
        assert "rate: up to 50 frames/s; latency" in str(plan)


def test_stashing_may_be_asked_for_at_a_rate():
    plan = pk.plan(EVEN, cluster_of(4), rate=30, schedule="pipedream")
    assert (plan.versions, plan.num_ranks) == (versions.Stash(), 3)
    same = pk.plan(EVEN, cluster_of(4), rate=30, versions=versions.Latest())
    assert (same.schedule, same.num_ranks, same.rate) == ("pipedream", 3, 30)
    assert "(30 frames/s asked for); latency" in str(same)


MISSING = {
    "gives 25 frames/s on 2 devices; its stage 0 (layer0 … layer3) takes 40 ms for a frame, and "
    "frames come every 25 ms; 4 devices like these would do": (
        EVEN, cluster_of(2), {"rate": 40},
    ),
    "gives 20 frames/s on 2 devices; its stage 1 (layer1) takes 50 ms for a frame, and frames "
    "come every 33.3 ms; more devices like these do not help, since layer layer1 alone takes 50 "
    "ms: make it smaller": (
        graph_of([0.03, 0.05]), cluster_of(2), {"rate": 30},
    ),
    "its stage 0 (layer0 … layer3) takes 40 ms for a frame, and frames come every 20 ms; leave "
    "stages to the planner": (
        EVEN, cluster_of(4), {"rate": 50, "stages": 2},
    ),
    "no stage takes longer than the 33.3 ms between frames, but hops of up to 100 ms hold them "
    "up, of which 16.7 ms are free; take smaller frames, or faster devices or links": (
        graph_of([0.02, 0.02]), cluster_of(2, hop_seconds=0.1), {"rate": 30, "stages": 2},
    ),
    "needs 8 B on rank 0 (device0), 4 B over the 4 B allowed": (
        graph_of([0.01], activation_bytes=8), cluster_of(1), {"rate": 30, "memory_bytes": 4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", MISSING)
def test_what_is_missing_is_told(message):
    graph, cluster, asked = MISSING[message]
    with pytest.raises(PlanError) as error:
        pk.plan(graph, cluster, schedule="partime", **asked)
    assert message in str(error.value)


@pytest.mark.parametrize("rate", [0, -30, float("nan"), float("inf"), "30", True])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(InputError, match="give frames per second, a number > 0"):
        pk.plan(EVEN, cluster_of(2), rate=rate)


@pytest.mark.parametrize(
    "asked",
    [{"schedule": "1f1b"}, {"versions": versions.Flush()}, {"placer": "reinforce"}],
)
def test_what_drains_has_no_rate(asked):
    with pytest.raises(InputError, match=r"rate is for a stream that never ends, but .* drains at"):
        pk.plan(EVEN, cluster_of(2), rate=30, **asked)


def test_a_file_with_no_rate_that_can_be_is_refused():
    plan = json.loads(pk.plan(EVEN, cluster_of(4), rate=30).to_json())
    with pytest.raises(pk.errors.FileError, match="rate is 0; give frames per second"):
        pk.Plan.from_json(json.dumps({**plan, "rate": 0}))


def test_the_command_line_plans_for_a_rate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    EVEN.save("graph.json")
    cluster_of(4).save("cluster.json")
    command = "plan", "graph.json", "cluster.json", "--schedule", "partime"
    said = run(*command, "--rate", 30, "-o", "plan.json")
    assert (
        "(30 frames/s asked for); latency of an output: 20 ms at light load, 90 ms"
        in in_one_line(said)
    )
    plan = pk.Plan.load("plan.json")
    assert (plan.num_ranks, plan.num_microbatches, plan.rate) == (3, 1, 30)
    assert "rate: up to 50 frames/s; latency" in run(*command)
    assert "no plan keeps 300 frames/s" in refused(*command, "--rate", 300)
