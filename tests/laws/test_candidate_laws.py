"""What holds for every candidate of the search, the best and the worst: no bound that prunes is
above the simulated time, and the memory that is counted is that of the plan's ops."""

from __future__ import annotations

from dataclasses import replace as replaced
from itertools import combinations, groupby
from math import ceil

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock import Cluster, Link, schedules, simulate
from penstock.base.errors import InputError, PlanError
from penstock.core.cluster import Card, Group
from penstock.core.graph import Contention
from penstock.core.schedule.lower import add_update
from penstock.core.versions import USUAL, Flush
from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.cuts import candidates
from penstock.planning.planner.limits import least_excess
from penstock.planning.planner.offers import Offer
from penstock.planning.planner.offers import offers as every_offer
from penstock.planning.planner.request import Constraints
from penstock.planning.planner.task import Task
from tests.kit.planning import all_cuts, chain, clusters, devices, graphs, held_bytes, links

FAMILIES = [name for name in schedules.names() if name not in {"zb-auto", "optimal", "chimera"}]
WITH_REPLICAS = ("1f1b", "gpipe", "pipedream", "pipedream-2bw")


@st.composite
def offers(draw, task):
    """A family that may refuse, on some of the devices, with or without replicas."""
    num_devices = len(task.cluster.devices)
    chosen = draw(st.permutations(range(num_devices)))[: draw(st.integers(1, num_devices))]
    family, replicas = draw(st.sampled_from(FAMILIES)), ()
    if draw(st.booleans()) and family in WITH_REPLICAS:
        first = draw(st.integers(1, len(chosen)))
        replicas = (first, len(chosen) - first) if first < len(chosen) else (first,)
    versions = USUAL.get(family, Flush())
    if not versions.asynchronous and family not in WITH_REPLICAS and len(chosen) % 2 == 0:
        width = draw(st.sampled_from([1, 2, len(chosen)]))
        try:
            pipeline = schedules.build(
                family, num_ranks=len(chosen) // width, num_microbatches=2 * len(chosen)
            )
        except InputError:
            assume(False)
        replicas = (width,) * pipeline.num_stages if width > 1 else ()
    rules = ("where-needed", "never", "stage", "layers")
    rule = "never" if versions.asynchronous else draw(st.sampled_from(rules))
    return Offer(family, tuple(chosen), versions, replicas, (), rule)


@st.composite
def tasks(draw):
    cluster = draw(clusters())
    if draw(st.booleans()) and len(cluster.devices) > 1:
        # Some share a host, and slow each other or not; others have one of their own.
        names = tuple(device.name for device in cluster.devices[:2])
        host = Group(name="host", members=names, link=Link(), memory_bytes=10**9)
        cluster = replace(cluster, groups=(host,))
    graph = draw(graphs(most=6, tied=draw(st.booleans())))
    return Task(graph, cluster, draw(st.integers(1, 6)))


def setting_of(offer, task):
    # With a flush, a replica without a microbatch is refused where the plan is made.
    assume(offer.versions.asynchronous or max(offer.replicas, default=1) <= task.num_microbatches)
    try:
        return offer.setting(task)
    except (InputError, PlanError):
        assume(False)


@st.composite
def any_candidates(draw):
    """(offer, candidate) with any cuts, sensible or not."""
    task = draw(tasks())
    offer = draw(offers(task))
    setting = setting_of(offer, task)
    cuts = draw(st.sampled_from(list(all_cuts(task.num_layers, setting.num_stages))))
    ways = ("none",) if setting.versions.asynchronous else ("none", "stage", "layers")
    how = tuple(draw(st.sampled_from(ways)) for _ in range(setting.num_stages))
    return offer, Candidate(task, setting, cuts, how)


@given(any_candidates())
def test_no_bound_is_above_the_simulated_time(pair):
    offer, candidate = pair
    assert candidate.least_seconds <= candidate.seconds * (1 + 1e-9) + 1e-12
    assert offer.least_seconds(candidate.task) <= candidate.seconds * (1 + 1e-9) + 1e-12


@given(any_candidates())
def test_no_candidate_misses_its_limits_by_less_than_the_bound_says(pair):
    _, candidate = pair
    assert least_excess(candidate.task) <= candidate.excess.num_bytes


@given(any_candidates())
def test_memory_is_what_the_ops_of_the_plan_keep(pair):
    _, candidate = pair
    found = candidate.to_plan()
    setting, count = candidate.setting, candidate.task.num_microbatches
    alone = replaced(candidate)
    assert {rank: alone.held_on(rank) for rank in candidate.held} == candidate.held
    simulated = held_bytes(found)
    assert all(a >= b for a, b in zip(candidate.rank_bytes, simulated, strict=True))
    # Later replicas may have a microbatch less, and are counted as if they did not.
    if not found.versions.asynchronous and all(count % own == 0 for own in setting.replicas):
        assert candidate.rank_bytes == tuple(map(ceil, simulated))
        assert candidate.rank_bytes == found.rank_bytes
    assert all(a >= b for a, b in zip(candidate.rank_bytes, found.rank_bytes, strict=True))
    assert candidate.seconds == pytest.approx(found.step_seconds)


@st.composite
def beside_one_another(draw):
    """(the pipelines' number, a candidate of three or four of them, on hosts with cards or not)."""
    depth, width = draw(st.integers(1, 2)), draw(st.integers(3, 4))
    family = draw(st.sampled_from(("1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-v")))
    graph, count = draw(graphs(most=6)), draw(st.integers(width, 2 * width + 1))
    names = [f"d{k}" for k in range(depth * width)]
    size = draw(st.sampled_from([1, 2, width]))
    hosts = tuple(
        Group(name=f"host{k}", members=names[k : k + size], card=Card(bytes_per_second=1e4))
        for k in range(0, len(names), size)
    )
    there = replace(
        devices(len(names)), link=draw(links), groups=hosts if draw(st.booleans()) else ()
    )
    num_stages = depth * (2 if family in ("interleaved-1f1b", "zb-v") else 1)
    assume(num_stages <= len(graph.layers))
    task, replicas = Task(graph, there, count), (width,) * num_stages
    setting = Offer(family, tuple(range(depth * width)), replicas=replicas).setting(task)
    cuts = draw(st.sampled_from(list(all_cuts(task.num_layers, num_stages))))
    how = tuple(draw(st.sampled_from(("none", "stage", "layers"))) for _ in range(num_stages))
    return width, Candidate(task, setting, cuts, how)


@settings(max_examples=80)
@given(beside_one_another())
def test_the_first_and_the_last_of_many_pipelines_tell_what_all_do(pair):
    width, candidate = pair
    plan, setting = candidate.to_plan(), candidate.setting
    assert setting.schedule.num_ranks * width == 2 * setting.num_ranks
    placed = plan.placement
    assert tuple(map(placed.ranks_of, range(setting.num_stages))) == tuple(
        map(tuple, setting.ranks_of)
    )
    step = simulate(add_update(placed), plan.costs).makespan
    assert step == pytest.approx(candidate.seconds) == pytest.approx(plan.step_seconds)
    assert all(a >= b for a, b in zip(candidate.rank_bytes, plan.rank_bytes, strict=True))
    if candidate.task.num_microbatches % width == 0:
        assert candidate.rank_bytes == plan.rank_bytes


@settings(max_examples=60)
@given(st.data())
def test_the_cuts_that_are_proposed_keep_the_limits(data):
    task = data.draw(tasks())
    offer = data.draw(offers(task))
    setting = setting_of(offer, task)
    for one in candidates(task, setting):
        held = one.to_plan().rank_bytes
        assert all(
            num_bytes <= task.devices.limits[device]
            for num_bytes, device in zip(held, setting.devices, strict=True)
        )
        assert sum(held) <= (task.cluster.memory_bytes or sum(held))


@given(graphs(most=7))
def test_what_runs_again_together_keeps_one_input_and_works_on_all_its_activations(graph):
    task = Task(graph, Cluster.local(1, kind="cpu"), 1)
    for start, stop in combinations(range(task.num_layers + 1), 2):
        together = [
            [start + index for index, _ in own]
            for unit, own in groupby(enumerate(graph.layers[start:stop]), lambda pair: pair[1].unit)
            if unit
        ]
        alone = [[index] for index in range(start, stop) if not graph.layers[index].unit]
        units = together + alone
        kept = sum(task.layers.input_bytes[own[0]] for own in units)
        room = max(
            max(graph.layers[index].workspace_bytes for index in own)
            + sum(graph.layers[index].activation_bytes for index in own)
            for own in units
        )
        assert task.layers.again_input_bytes(start, stop) == kept
        assert task.layers.workspace_bytes(start, stop, again=True) == room
        row = stop - start - 1
        tables = task.layers.tables(row + 1)
        assert tables["again_input_bytes"][row, stop] == kept
        assert tables["again_workspace_bytes"][row, stop] == room


def test_a_host_whose_ranks_help_each_other_lowers_the_bounds_of_the_others_too():
    names = ("d0", "d1")
    cluster = replace(
        devices(3), groups=(Group(name="host", members=names, link=Link(), memory_bytes=10**9),)
    )
    graph = replace(chain(4), contention=Contention(whole=0.8, split=0.8, stream=0.6))
    task, tried = Task(graph, cluster, 6), 0
    for leave in ("no", "also"):
        for offer in every_offer(task, Constraints(asynchronous=leave)):
            try:
                setting = offer.setting(task)
            except (InputError, PlanError):
                continue  # nobody can have that
            for one in candidates(task, setting):
                assert offer.least_seconds(task) <= one.seconds * (1 + 1e-9)
                tried += 1
    assert tried > 20
