"""What other hardware would change, and what cannot be asked."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock import Cluster, Device, Link
from penstock.base.errors import InputError, PlanError
from penstock.core.cluster import Group, Wire
from penstock.core.cluster.cluster import only
from penstock.core.graph import Contention
from penstock.planning.planner import what_if
from tests.kit.planning import KIB, chain, clusters, devices, graphs

SLOW = replace(devices(4), link=Link(latency_seconds=0.001, bytes_per_second=100.0 * KIB))


def test_bandwidth_and_memory_are_changed_and_shown():
    found = what_if("bandwidth*2, memory=64KiB", chain(), SLOW, microbatches=4, stages=2)
    hops = [one.stages[0].hop_seconds for one in (found.before, found.after)]
    assert hops == [pytest.approx(0.021), pytest.approx(0.011)]
    assert [one.memory_bytes for one in found.after.devices] == [64 * KIB] * 2
    lines = str(found).splitlines()
    assert "with bandwidth*2," in lines[0] and "memory=64KiB" in lines[1]
    rows = {line.split("  ")[0].strip(): line for line in lines}
    assert {"plan", "layers", "step", "memory of a rank", "recompute"} <= rows.keys()
    faster = found.before.step_seconds / found.after.step_seconds
    assert f"{faster:.2f}× as fast" in rows["step"]
    assert "\x1b" not in str(found)


def test_less_memory_brings_recompute():
    found = what_if(
        "memory/2", chain(), devices(2), microbatches=8, stages=2, memory_bytes=42 * KIB
    )
    assert found.rows()[-1][1:3] == ("none", "stages 0, 1")
    assert max(found.after.rank_bytes) <= 21 * KIB < max(found.before.rank_bytes)


def test_the_limits_of_groups_and_of_the_cluster_are_memory_too():
    names = ("d0", "d1")
    group = Group(name="server", members=names, memory_bytes=200 * KIB)
    cluster = replace(devices(2), groups=(group,), memory_bytes=100 * KIB)
    # 84 KiB in all keep to both limits, but not to half of the cluster's.
    found = what_if("memory/2", chain(), cluster, microbatches=4)
    assert sum(found.before.rank_bytes) > 50 * KIB >= sum(found.after.rank_bytes)


@pytest.mark.parametrize(
    ("change", "devices_after"), [("devices*2", 4), ("devices=1", 1), ("devices/2", 1)]
)
def test_the_number_of_devices(change, devices_after):
    found = what_if(change, chain(), devices(2), microbatches=8, schedule="1f1b")
    assert (found.before.num_ranks, found.after.num_ranks) == (2, devices_after)


def test_faster_devices_and_other_microbatches():
    faster = what_if("speed*2", chain(), devices(2), microbatches=8)
    assert faster.after.step_seconds == pytest.approx(faster.before.step_seconds / 2)
    more = what_if("microbatches*2", chain(), devices(2), microbatches=8)
    assert more.after.num_microbatches == 16
    later = what_if("latency=5ms", chain(), SLOW, microbatches=4, stages=2)
    assert later.after.stages[0].hop_seconds == pytest.approx(0.025)


def test_a_change_that_leaves_no_plan_says_so():
    with pytest.raises(PlanError, match="no plan fits in memory"):
        what_if("memory/100", chain(), devices(2), microbatches=8, memory_bytes=42 * KIB)


def test_memory_divided_by_much_is_little_and_not_unlimited():
    for cluster in (devices(2, memory_bytes=64 * KIB), replace(devices(2), memory_bytes=64 * KIB)):
        with pytest.raises(PlanError, match="no plan fits in memory"):
            what_if("memory/1e9", chain(), cluster, microbatches=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("bandwith*2", r"'bandwith\*2' is no change; write for example bandwidth\*2 .* of bandw"),
        ("bandwidth", "'bandwidth' is no change"),
        ("bandwidth^2", "is no change"),
        ("bandwidth+2", "'2' is not a number with a unit"),
        ("bandwidth*2 memory/2", "is no change"),
        ("bandwidth*fast", "bandwidth: 'fast' is not a number"),
        ("bandwidth*0", "bandwidth: 0 must be > 0"),
        ("bandwidth*-1", "bandwidth: -1 must be > 0"),
        ("bandwidth*nan", "bandwidth: nan must be > 0"),
        ("bandwidth*inf", "bandwidth: inf must be > 0 and finite"),
        ("memory*inf", "memory: inf must be > 0 and finite"),
        ("devices*inf", "devices: inf must be > 0 and finite"),
        ("devices*0.1", r"devices\*0.1 leaves none of 4"),
        ("memory=16 parsecs", "is no change"),
        ("memory=16parsecs", "16parsecs"),
        ("bandwidth*1", r"'bandwidth\*1' changes nothing"),
        ("", "'' changes nothing"),
        ("memory*2", r"'memory\*2' changes nothing: what it changes has no limit here"),
        ("microbatches=0.1", "microbatches is 0"),
    ],
)
def test_nonsense_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        what_if(change, chain(), SLOW, microbatches=4)


def test_microbatches_that_nobody_gave_cannot_be_changed():
    with pytest.raises(InputError, match="only where their number is given"):
        what_if("microbatches*2", chain(), devices(2), minibatch=8)


# What proposes replicas looks at the steady state, so with few microbatches on devices of mixed
# speeds a plan can be missed that was found under other numbers; 11 % were seen.
MISSED = 1.25


@settings(max_examples=8)
@given(graphs(most=5), clusters(most=3), st.integers(1, 6))
def test_more_bandwidth_is_hardly_slower_and_less_memory_hardly_faster(graph, cluster, count):
    # Where company makes devices faster, the search has more than one valley.
    graph = replace(graph, contention=Contention())
    limited = replace(cluster, link=Link(bytes_per_second=2e4), memory_bytes=40_000)
    try:
        faster = what_if("bandwidth*2", graph, limited, microbatches=count)
    except PlanError:
        return
    assert faster.after.step_seconds <= faster.before.step_seconds * MISSED + 1e-9
    try:
        smaller = what_if("memory/2", graph, limited, microbatches=count)
    except PlanError:
        return
    assert smaller.after.step_seconds * MISSED + 1e-9 >= smaller.before.step_seconds


def test_some_devices_of_a_cluster_keep_what_joins_them():
    fast, slow = Link(bytes_per_second=1e9), Link(bytes_per_second=1e6)
    names = tuple(f"d{index}" for index in range(4))
    whole = Cluster(
        devices=tuple(Device(name=name) for name in names),
        link=slow,
        groups=(
            Group(name="a", members=names[:2], link=fast, memory_bytes=9),
            Group(name="b", members=names[2:], link=fast),
            Group(name="rack", members=("a", "b"), link=slow),
        ),
        wires=(Wire(between=("d0", "d3"), link=fast), Wire(between=("d0", "d1"), link=slow)),
    )
    assert only(whole, range(4)) == whole
    found = only(whole, {1, 0})
    assert [one.name for one in found.devices] == ["d0", "d1"]
    assert {one.name: one.members for one in found.groups} == {"a": ("d0", "d1"), "rack": ("a",)}
    assert found.groups[0].memory_bytes == 9
    assert found.wires == (whole.wires[1],)
