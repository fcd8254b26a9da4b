"""Where the search says that nothing fits, brute force finds nothing either; and what the message
says would fit, fits."""

from __future__ import annotations

import re
from itertools import permutations, product
from math import ceil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock import plan
from penstock.base.errors import InputError, PlanError
from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.offers import Offer
from penstock.planning.planner.task import Task
from tests.kit.examples import examples
from tests.kit.planning import all_cuts, clusters, devices, graphs, held_bytes

SINGLE = ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2")
WAYS = ("none", "stage", "layers")


def keeps_limits(found, cluster, memory_bytes):
    limits = {device.name: device.memory_bytes for device in cluster.devices}
    held = held_bytes(found)
    return all(
        num_bytes <= (limits[device.name] or num_bytes) and num_bytes <= (memory_bytes or num_bytes)
        for num_bytes, device in zip(held, found.devices, strict=True)
    ) and sum(held) <= (cluster.memory_bytes or sum(held))


def everything(task):
    """All plans with one stage per rank, on all choices of devices in all orders."""
    for num_ranks in range(1, min(len(task.cluster.devices), task.num_layers) + 1):
        for family, chosen in product(
            SINGLE, permutations(range(len(task.cluster.devices)), num_ranks)
        ):
            try:
                setting = Offer(family, chosen).setting(task)
            except (InputError, PlanError):
                continue
            for cuts in all_cuts(task.num_layers, num_ranks):
                for how in product(WAYS, repeat=num_ranks):
                    yield Candidate(task, setting, cuts, how).to_plan()


REQUESTS = st.fixed_dictionaries(
    {"microbatches": st.integers(1, 4)}, optional={"memory_bytes": st.integers(500, 9000)}
)


@examples(10)
@given(graphs(most=5), clusters(most=3), REQUESTS, st.sampled_from(["where-needed", "never"]))
def test_no_simulated_rank_holds_more_than_its_limit(graph, cluster, request, recompute):
    try:
        found = plan(graph, cluster, recompute=recompute, asynchronous=True, **request)
    except PlanError:
        return
    assert keeps_limits(found, cluster, request.get("memory_bytes"))


@settings(examples(6), suppress_health_check=list(HealthCheck))
@given(graphs(most=4), clusters(most=2), REQUESTS)
def test_where_nothing_fits_there_is_nothing(graph, cluster, request):
    try:
        plan(graph, cluster, **request)
    except PlanError as error:
        assert "no plan fits in memory" in str(error)
        task = Task(graph, cluster, request["microbatches"], request.get("memory_bytes"))
        for found in everything(task):
            assert not keeps_limits(found, cluster, request.get("memory_bytes"))


@examples(10)
@given(graphs(most=5), clusters(most=3), REQUESTS, st.booleans())
def test_what_a_refusal_proposes_fits(graph, cluster, request, pinned):
    more = {"schedule": "1f1b", "stages": 1, "recompute": "never"} if pinned else {}
    try:
        plan(graph, cluster, **request, **more)
        return
    except PlanError as error:
        message = str(error)
    if "give it" in message:
        count = int(re.search(r"give it (\d+) devices", message)[1])
        own = cluster.devices
        names = (replace(own[k % len(own)], name=f"n{k}") for k in range(count))
        assert plan(graph, replace(cluster, devices=tuple(names)), **request)
    elif "allow recomputing" in message:
        assert plan(graph, cluster, **request, **{**more, "recompute": "where-needed"})
    elif "leave schedule, stages and cuts to" in message:
        assert plan(graph, cluster, **request, recompute="never")
    elif "leave recomputing" in message:
        assert plan(graph, cluster, **request)
    else:
        assert "allow that much" in message
        with pytest.raises(PlanError):
            plan(graph, cluster, **request)


@examples(15)
@given(st.data(), graphs(most=5), st.integers(1, 3), st.integers(1, 5))
def test_devices_with_what_some_plan_needs_have_a_plan(data, graph, num_ranks, count):
    num_ranks = min(num_ranks, len(graph.layers))
    task = Task(graph, devices(num_ranks), count)
    setting = Offer(data.draw(st.sampled_from(SINGLE)), tuple(range(num_ranks))).setting(task)
    cuts = data.draw(st.sampled_from(list(all_cuts(task.num_layers, num_ranks))))
    how = tuple(data.draw(st.sampled_from(WAYS)) for _ in range(num_ranks))
    needed = held_bytes(Candidate(task, setting, cuts, how).to_plan())
    tight = tuple(
        replace(device, memory_bytes=max(1, ceil(held)))
        for device, held in zip(task.cluster.devices, needed, strict=True)
    )
    # In this order, on all of them or on fewer.
    assert plan(graph, replace(task.cluster, devices=tight), microbatches=count)
