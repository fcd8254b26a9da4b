"""DAPPLE's estimate, its placements and its planner, on cases that can be worked out by hand."""

from __future__ import annotations

import pytest

from penstock.base.errors import InputError, PlanError
from penstock.core.cluster import Cluster, Device, Group, Link
from penstock.core.graph import Layer, LayerGraph
from penstock.planning.partition.dapple import dapple_candidates
from penstock.planning.partition.dapple_rules import servers, take
from tests.kit.dapple_estimate import latency, lower_bound, pivot, placements
from tests.laws.test_dapple_laws import step

TWO_SERVERS = Cluster.tree((4, 2), (Link(bytes_per_second=1e9), Link(bytes_per_second=1e6)))


def chain(seconds, parameter_bytes=0, output_bytes=0):
    return LayerGraph(
        layers=tuple(
            Layer(
                name=f"layer{at}",
                forward_seconds=one,
                backward_input_seconds=one,
                backward_weight_seconds=one,
                output_bytes=output_bytes,
                parameter_bytes=parameter_bytes,
            )
            for at, one in enumerate(seconds)
        )
    )


def test_equal_stages_give_the_textbook_step():
    assert latency([1] * 4, [2] * 4, [0] * 4, 8) == (8 + 4 - 1) * 3
    assert lower_bound([1] * 4, [2] * 4, [0] * 4, 8) == (8 + 4 - 1) * 3


def test_an_earlier_stage_takes_over_only_if_it_beats_those_behind_it():
    # 3·(F+B) against 3·2 and the stage in between.
    assert pivot([1.6, 1, 1], [1.6, 1, 1], 4) == 0
    assert pivot([1.3, 1, 1], [1.3, 1, 1], 4) == 2
    assert pivot([1.3, 1, 1], [1.3, 1, 1], 40) == 0
    assert pivot([1, 1, 1], [1, 1, 1], 1) == 2


def test_reductions_wait_for_their_own_stage():
    # The last stage has its gradients first; the first stage's reduction cannot hide.
    assert latency([1, 1], [2, 2], [5, 0], 4) == 15 + 5
    assert latency([1, 1], [2, 2], [0, 5], 4) == 2 + 3 * 3 + 2 + 5
    assert latency([1, 1], [2, 2], [0, 3], 4) == 2 + 3 * 3 + 2 + 3


def test_hops_count_as_stages():
    with_hop = latency([1, 1], [1, 1], [0, 0], 4, hops=[0.5])
    assert with_hop == latency([1, 0.5, 1], [1, 0.5, 1], [0, 0, 0], 4) == 2.5 + 6 + 2.5


def test_the_papers_estimate_is_no_bound_behind_a_slow_pivot():
    forward, backward, reduce = [1, 0.1, 0.1, 0.1], [10, 0.1, 0.1, 0.1], [0, 100, 0, 0]
    measured = step(forward, backward, reduce, 8)
    assert latency(forward, backward, reduce, 4) > 1.1 * measured
    assert lower_bound(forward, backward, reduce, 4) <= measured


def test_nor_where_a_link_is_the_pivot_and_messages_do_not_wait_for_each_other():
    measured = step([1, 1], [1, 1], [0, 0], 64, hops=[10])
    assert latency([1, 1], [1, 1], [0, 0], 32, hops=[10]) > 1.5 * measured
    assert lower_bound([1, 1], [1, 1], [0, 0], 32, hops=[10]) <= measured


def test_servers_are_the_innermost_groups():
    assert servers(TWO_SERVERS) == ((0, 1, 2, 3), (4, 5, 6, 7))
    rack = Cluster.tree((2, 2, 2), (Link(), Link(), Link()))
    assert servers(rack) == ((0, 1), (2, 3), (4, 5), (6, 7))
    flat = Cluster(devices=tuple(Device(name=f"d{at}") for at in range(3)))
    assert servers(flat) == ((0, 1, 2),)
    mixed = Cluster(devices=flat.devices, groups=(Group(name="a", members=("d0", "d2")),))
    assert servers(mixed) == ((0, 2), (1,))


def test_the_three_placements():
    assert placements(TWO_SERVERS, (1, 4, 3)) == {
        "fresh-first": ((0,), (4, 5, 6, 7), (1, 2, 3)),
        "append-first": ((0,), (1, 2, 3, 4), (5, 6, 7)),
        "scatter-first": ((0,), (1, 2, 4, 5), (3, 6, 7)),
    }


def test_of_used_servers_fresh_first_takes_the_emptiest_and_append_first_the_fullest():
    assert take("fresh-first", [4, 4], [3, 1], 2) == (0, 2)
    assert take("append-first", [4, 4], [3, 1], 2) == (1, 1)
    assert take("scatter-first", [4, 4, 4], [3, 1, 0], 4) == (1, 1, 2)


def test_rules_refuse_too_many_replicas_and_have_names():
    with pytest.raises(PlanError, match="9 replicas do not fit on 8 free devices"):
        take("fresh-first", [4, 4], [0, 0], 9)
    with pytest.raises(InputError, match="rule"):
        take("first", [1], [0], 1)


def test_light_parameters_make_one_replicated_stage():
    best = dapple_candidates(chain([1] * 8), TWO_SERVERS, 16)[0]
    assert (best.cuts, best.replicas) == ((0, 8), (8,))
    assert best.bound_seconds == pytest.approx(2 * 24)


def test_heavy_parameters_make_a_straight_pipeline():
    best = dapple_candidates(chain([1] * 8, parameter_bytes=10**11), TWO_SERVERS, 64)[0]
    assert best.replicas == (1,) * 8
    assert best.bound_seconds == pytest.approx((64 + 7) * 3)


def test_replicas_stay_in_a_server_where_the_link_between_servers_is_slow():
    best = dapple_candidates(chain([1] * 8, parameter_bytes=2 * 10**6), TWO_SERVERS, 32)[0]
    inside = [{device // 4 for device in stage} for stage in best.devices if len(stage) > 1]
    assert inside
    assert all(len(one) == 1 for one in inside)


def test_candidates_are_different_and_respect_limits():
    found = dapple_candidates(
        chain([1, 2, 3, 2, 1]), TWO_SERVERS, 8, fits=lambda start, stop, count: stop - start <= 2
    )
    assert found
    assert len({(one.cuts, one.devices) for one in found}) == len(found)
    for one in found:
        widths = [stop - start for start, stop in zip(one.cuts, one.cuts[1:], strict=False)]
        assert max(widths) <= 2
    nothing = dapple_candidates(chain([1, 2]), TWO_SERVERS, 8, fits=lambda *_: False)
    assert nothing == ()


def test_a_long_chain_on_many_devices_is_thinned_out_not_refused():
    graph = chain([1 + at % 3 for at in range(60)], parameter_bytes=1000, output_bytes=10)
    found = dapple_candidates(
        graph, Cluster.tree((4, 3), (Link(), Link())), 24, count=2, max_cuts=8
    )
    assert len(found) == 2
    assert found[0].cuts[-1] == 60
    # No plan beats all devices being busy all the time.
    assert found[0].bound_seconds >= 24 * 3 * 120 / 12


def test_counts_below_one_are_refused():
    for wrong in ({"beam": 0}, {"count": 0}):
        with pytest.raises(InputError, match="must be ≥ 1"):
            dapple_candidates(chain([1]), TWO_SERVERS, 4, **wrong)
    with pytest.raises(InputError, match="num_microbatches"):
        dapple_candidates(chain([1]), TWO_SERVERS, 0)
