"""No smaller part of a cluster does what the fewest devices do, and none costs less."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock import Cluster
from penstock.planning.plans.spending import spending_of
from tests.kit.examples import examples
from tests.kit.planning import attempt, clusters, graphs

_TIE = 1.01
"""No prediction tells plans apart that are so close."""


def on_first(graph, cluster, count, **request):
    part = Cluster(
        devices=cluster.devices[:count], link=cluster.link, memory_bytes=cluster.memory_bytes
    )
    return attempt(graph, part, **request)


@examples(3)
@given(graphs(most=4), clusters(most=3), st.integers(1, 6), st.floats(0.1, 2.0))
def test_fewer_devices_do_not_do(graph, cluster, microbatches, share):
    request = {"microbatches": microbatches, "spill": "never"}
    fastest = attempt(graph, cluster, **request)
    if fastest is None or not fastest.step_seconds:
        return
    one = on_first(graph, cluster, 1, **request)
    within = (
        fastest.step_seconds * (1 + share)
        if one is None
        else (fastest.step_seconds + share / 2 * max(one.step_seconds - fastest.step_seconds, 0))
    )
    fewest = attempt(graph, cluster, objective="devices", within_seconds=within, **request)
    if fewest is None:
        # At most where ties hide what is fast enough.
        assert fastest.step_seconds * _TIE > within
        return
    assert fewest.step_seconds <= within
    for count in range(1, fewest.num_ranks):
        fewer = on_first(graph, cluster, count, **request)
        assert fewer is None or fewer.step_seconds > within / _TIE


@examples(3)
@given(graphs(most=4), clusters(most=3), st.integers(1, 6))
def test_no_part_costs_less(graph, cluster, microbatches):
    request = {"microbatches": microbatches, "spill": "never"}
    cheapest = attempt(graph, cluster, objective="cost", **request)
    if cheapest is None:
        assert attempt(graph, cluster, **request) is None
        return
    for device, held in zip(cheapest.devices, cheapest.rank_bytes, strict=True):
        assert held <= (device.memory_bytes or held)
    for count in range(1, len(cluster.devices) + 1):
        other = on_first(graph, cluster, count, **request)
        if other is not None:
            assert spending_of(cheapest).amount <= spending_of(other).amount * _TIE
