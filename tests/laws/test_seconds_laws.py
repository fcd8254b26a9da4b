"""Where the seconds of a step go: the parts are the step, and each is what it says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock import Cluster, Tier, plan
from penstock.core.schedule.op import Kind
from penstock.planning.plans.seconds import seconds_of_ranks, slowest_of
from tests.kit.examples import examples
from tests.kit.planning import attempt, chain, clusters, devices, graphs

REQUESTS = [
    {},
    {"asynchronous": True},
    {"schedule": "pipedream"},
    {"schedule": "zb-h1"},
    {"schedule": "zb-v"},
    {"schedule": "interleaved-1f1b"},
    {"schedule": "seq1f1b:num_slices=2"},
    {"schedule": "1f1b", "replicas": "2-1"},
    {"replicas": "3"},
    {"recompute": "stage"},
    {"recompute": "layers"},
    {"tensor_ranks": 2},
    {"tensor_ranks": "any", "reducer": "any"},
    {"schedule": "partime", "microbatches": 1},
]


def check(found):
    step, ranks = found.step_seconds, seconds_of_ranks(found)
    assert len(ranks) == found.num_ranks
    for parts in ranks:
        assert sum(parts) == pytest.approx(step, rel=1e-9, abs=1e-12)
        assert min(parts) >= -1e-9 * step
    assert slowest_of(ranks) in range(found.num_ranks)
    if found.prediction.flushes and found.spill is None:
        for parts, busy in zip(ranks, found.simulate().busy, strict=True):
            assert parts.busy == pytest.approx(busy, rel=1e-9, abs=1e-12)
    return ranks


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
@examples(3)
@given(graph=graphs(most=5), cluster=clusters(most=3), microbatches=st.integers(1, 6))
def test_the_parts_are_the_step(request_, graph, cluster, microbatches):
    request = {"microbatches": microbatches, "spill": "never", **request_}
    try:
        found = attempt(graph, cluster, **request)
    except ValueError:  # too few devices or layers for what is asked
        return
    if found is not None and found.step_seconds:
        check(found)


def test_stages_that_come_and_go():
    tiers = (Tier(kind="host", read_bytes_per_second=1e4, write_bytes_per_second=1e4),)
    cluster = replace(Cluster.local(2), tiers=tiers)
    found = plan(
        chain(8, parameter_bytes=4000), cluster, microbatches=4, spill="always", memory_bytes=60_000
    )
    assert all(parts.tiers > 0 for parts in check(found))


def test_what_each_part_is():
    graph = replace(chain(8, update_seconds=0.002, output_bytes=4000), op_seconds=0.001)
    cluster = replace(devices(4), link=replace(Cluster.local(1).link, bytes_per_second=1e6))
    request = {"microbatches": 8, "schedule": "1f1b", "stages": 4}
    ranks = check(plan(graph, cluster, **request))
    first = ranks[0]
    assert first.launch == pytest.approx(8 * 2 * 0.001)
    assert first.update == pytest.approx(2 * 0.002)
    assert first.hops > 0 and not first.sums and not first.recompute and not first.collectives
    assert first.compute == pytest.approx(8 * sum(la.compute_seconds for la in graph.layers[:2]))
    again = check(plan(graph, cluster, recompute="stage", **request))
    forward = sum(layer.forward_seconds for layer in graph.layers[:2])
    assert again[0].recompute == pytest.approx(8 * (forward + 0.001))
    free = check(plan(graph, replace(cluster, link=Cluster.local(1).link), **request))
    assert not free[0].hops


def test_sums_that_hide_add_nothing():
    graph = chain(4, parameter_bytes=1 << 20, output_bytes=10)
    slow = replace(devices(2), link=replace(Cluster.local(1).link, bytes_per_second=1e7))
    found = plan(graph, slow, microbatches=8, replicas="2")
    (parts, _) = check(found)
    whole = sum(stage.reduce_seconds for stage in found.stages)
    assert 0 < parts.sums < whole


def test_tensor_ranks_exchange_inside_layers():
    graph = chain(4, kind="Linear", parameter_bytes=1 << 20, output_bytes=1 << 12)
    slow = replace(devices(2), link=replace(Cluster.local(1).link, bytes_per_second=1e6))
    found = plan(graph, slow, microbatches=2, tensor_ranks=2)
    (parts,) = check(found)
    exchanged = sum(stage.collective_seconds for stage in found.stages)
    assert parts.collectives == pytest.approx(2 * exchanged) and exchanged > 0
    assert any(span.op.kind is Kind.FORWARD for span in found.simulate().spans)
