"""Plans say how sure they are of what ranks of one machine cost each other."""

from __future__ import annotations

from msgspec.structs import replace

import penstock as pk
from penstock.core.graph import Contention, Estimate
from tests.kit.planning import chain, devices, in_one_line

CROWD = replace(devices(2), memory_bytes=10**12)


def planned(whole, spread, cluster=CROWD, warnings=(), **request):
    contention = Contention(
        whole=whole, split=whole, stream=whole, whole_spread=spread, split_spread=spread,
        stream_spread=spread, num_ranks=2, num_rounds=4,
    )  # fmt: skip
    graph = replace(chain(6), contention=contention, warnings=warnings)
    return pk.plan(graph, cluster, microbatches=8, **request)


def test_a_plan_that_another_throw_would_change_says_so():
    found = planned(2.0, 0.2)
    assert len(found.stages) == 1
    (warning,) = found.warnings
    assert "the choice hangs on contention, 2.00 ± 20.0%" in warning
    assert "if it is less, 1.20" in warning and "--patience" in warning
    assert f"! {warning}" in in_one_line(found)
    # Asked for, one device hangs on nothing.
    assert not planned(2.0, 0.2, stages=1).warnings


def test_a_pipeline_may_hang_on_it_as_well():
    found = planned(1.6, 0.2)
    assert found.num_ranks == 2
    (warning,) = found.warnings
    assert "if it is more, 2.24, 1 stage with 1f1b would take" in warning


def test_a_steady_figure_raises_no_doubt_and_is_told():
    found = planned(1.1, 0.01)
    assert not found.warnings
    assert "passes take 1.10 ± 1.0% times as long" in str(found)
    assert pk.Plan.from_json(found.to_json()) == found


def test_what_the_profile_warns_of_counts_where_ranks_share_a_machine():
    assert planned(2.0, 0.0, warnings=("busy",)).warnings == ("busy",)
    apart = planned(2.0, 0.2, devices(2), warnings=("busy",))
    assert not apart.warnings and "share a machine" not in str(apart)


def test_an_estimate_for_an_accelerator_on_cores_is_doubted():
    estimates = (Estimate(device=name, basis="nothing") for name in ("h100-sxm", "mine"))
    known, own = (replace(chain(4), estimate=estimate) for estimate in estimates)
    *_, warning = pk.plan(known, pk.Cluster.local(2), microbatches=4).warnings
    assert "but the cluster has CPU cores" in warning and 'pk.Cluster.of("h100-sxm")' in warning
    for graph, cluster in ((known, pk.Cluster.of("h100-sxm")), (own, pk.Cluster.local(2))):
        warnings = pk.plan(graph, cluster, microbatches=4).warnings
        assert not any("but the cluster has" in warning for warning in warnings)


def uneven(spreads):
    """Six layers of 1, 1, 1, 1, 1 and 1 ms, with what their times spread by."""
    graph = chain(6)
    layers = zip(graph.layers, spreads, strict=True)
    return replace(graph, layers=tuple(replace(layer, spread=one) for layer, one in layers))


def cut_in_two(spreads, **request):
    request = {"microbatches": 8, "stages": 2, "schedule": "1f1b", **request}
    return pk.plan(uneven(spreads), devices(2), **request)


def test_cuts_that_other_times_would_move_say_so():
    found = cut_in_two([0.4, 0.4, 0.4, 0, 0, 0])
    (warning,) = found.warnings
    assert "how long layers take: those of stage 0 were measured to ± 23%" in warning
    assert "if they take 0.54 times as long, a cut before" in warning
    assert "--repeats" in warning and f"! {warning}" in in_one_line(found)
    # It is true: with such times, the planner itself cuts there.
    slower = [layer.paced(0.54, 0.54) for layer in uneven([0] * 6).layers[:3]]
    graph = uneven([0] * 6)
    graph = replace(graph, layers=(*slower, *graph.layers[3:]))
    moved = pk.plan(graph, devices(2), microbatches=8, stages=2, schedule="1f1b")
    first = moved.stages[1].layers[0]
    assert f"a cut before {first!r} instead of {found.stages[1].layers[0]!r}" in warning


def test_cuts_raise_no_doubt_that_are_steady_or_asked_for():
    assert not cut_in_two([0.01] * 6).warnings
    assert not cut_in_two([0.4] * 6, cuts=[3], stages=None).warnings
    assert not cut_in_two([0.4] * 6, stages=1, schedule=None).warnings
    # What spreads is too small to move a layer for.
    assert not cut_in_two([0, 0, 0, 0, 0, 0.05]).warnings


def test_the_greatest_doubt_is_told():
    (warning,) = cut_in_two([0.1, 0.1, 0.1, 0.5, 0.5, 0.5]).warnings
    assert "those of stage 1 were measured to ± 29%" in warning
