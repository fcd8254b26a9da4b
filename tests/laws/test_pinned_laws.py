"""Whatever can be pinned or listed otherwise, a search that is free to choose finds nothing slower.

Cases are new each time; a failure prints the seed of its case, which ``PENSTOCK_SEED`` brings back.
"""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import pytest
from msgspec.structs import replace

from penstock.base.errors import InputError, PlanError
from penstock.core.schedule.families import UNLIKE_REPLICAS
from penstock.planning.planner.judged import raced
from penstock.planning.planner.patience import PlanningPatience
from penstock.planning.planner.request import PlanRequest
from penstock.planning.planner.search import tasks_of
from tests.kit.brute_force import small_case, wide_case
from tests.kit.examples import TIMES

WITHIN = 1.01
"""No prediction tells plans this close apart."""
NEAR = 1.05
"""Where not all orders and cuts are looked at."""


def seconds_of(graph, cluster, **wanted):
    """Of the best plan, without what else there is; infinite where there is none."""
    request = PlanRequest(**wanted)
    try:
        constraints = request.constraints(graph)
        tasks = tasks_of(graph, cluster, request, constraints)
        best = raced(tasks, constraints, PlanningPatience()).winner
    except (InputError, PlanError):
        return float("inf")
    return float("inf") if best is None else best.seconds


def all_replicas(num_devices, num_layers):
    """The replicas that stages may have on so many devices, or fewer."""
    for used in range(1, num_devices + 1):
        for num_stages in range(1, min(used, num_layers) + 1):
            for inner in combinations(range(1, used), num_stages - 1):
                yield tuple(b - a for a, b in pairwise((0, *inner, used)))


@pytest.mark.parametrize("family", UNLIKE_REPLICAS)
def test_no_given_replicas_are_faster_than_any(family, seed):
    slower = {}
    for number in range(seed, seed + 3 * TIMES):
        graph, cluster, microbatches = small_case(number)
        wanted = {"schedule": family, "microbatches": microbatches}
        free = seconds_of(graph, cluster, replicas="any", **wanted)
        for counts in all_replicas(len(cluster.devices), len(graph.layers)):
            pinned = seconds_of(graph, cluster, replicas=counts, **wanted)
            if free > pinned * WITHIN:
                slower[number, counts] = free / pinned
    assert not slower


@pytest.mark.soak  # of many cases, some are missed by more than a few percent
@pytest.mark.parametrize("family", UNLIKE_REPLICAS)
def test_on_more_devices_no_given_replicas_are_faster_than_any(family, seed):
    slower = {}
    for number in range(seed, seed + 2 * TIMES):
        graph, cluster, microbatches = wide_case(number)
        wanted = {"schedule": family, "microbatches": microbatches}
        free = seconds_of(graph, cluster, replicas="any", **wanted)
        every = list(all_replicas(len(cluster.devices), len(graph.layers)))
        most = len(cluster.devices)
        chosen = [(1,) * depth for depth in range(1, min(most, len(graph.layers)) + 1)]
        for counts in [*chosen, *Random(number).sample(every, 8)]:
            pinned = seconds_of(graph, cluster, replicas=counts, **wanted)
            if free > pinned * NEAR:
                slower[number, counts] = free / pinned
    assert not slower


def test_the_fastest_devices_are_tried_in_every_order():
    """The one with little memory does best between the two others, where no sorting puts it."""
    graph, cluster, microbatches = wide_case(781650415)
    wanted = {"schedule": "1f1b", "microbatches": microbatches}
    free, pinned = (
        seconds_of(graph, cluster, replicas=counts, **wanted) for counts in ("any", (1, 1, 1))
    )
    assert free <= pinned * WITHIN


@pytest.mark.parametrize(("case", "count"), [(small_case, 4), (wide_case, 2)])
def test_the_order_in_which_devices_are_listed_makes_no_difference(case, count, seed):
    for number in range(seed, seed + count * TIMES):
        graph, cluster, microbatches = case(number)
        listed = [*cluster.devices]
        Random(number).shuffle(listed)
        other = replace(cluster, devices=tuple(listed))
        took = seconds_of(graph, cluster, microbatches=microbatches)
        assert seconds_of(graph, other, microbatches=microbatches) == pytest.approx(took), number
