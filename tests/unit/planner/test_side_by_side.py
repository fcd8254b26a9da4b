"""Plans of equal pipelines side by side, of every schedule that drains."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock import Link, Plan, plan, simulate
from penstock.base.errors import InputError, PlanError
from penstock.core.cluster import Group
from penstock.core.schedule.lower import add_update
from penstock.planning.planner.offers import Offer
from penstock.planning.planner.task import Task
from tests.kit.planning import chain, devices

SCHEDULES = (
    "eager-1f1b", "interleaved-1f1b", "breadth-first", "zb-h1", "zb-h2", "zb-v", "interleaved-zb",
    "v-half", "v-min", "dualpipe-v", "hanayo", "seq1f1b", "zb-auto", "optimal",
)  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_that_drains_is_planned_with_replicas(schedule):
    planned = plan(chain(8), devices(4), microbatches=8, schedule=schedule, replicas="any")
    assert planned.schedule == schedule
    assert set(planned.replicas) == {2} and planned.num_ranks == 4
    assert planned.step_seconds == simulate(add_update(planned.placement), planned.costs).makespan
    assert Plan.from_json(planned.to_json()) == planned


@pytest.mark.parametrize(("microbatches", "schedule"), [(4, "interleaved-zb"), (8, "v-min")])
def test_without_room_for_data_parallelism_several_pipelines_are_found_unasked(
    microbatches, schedule
):
    graph = chain(8)
    whole = plan(graph, devices(1), microbatches=microbatches).rank_bytes[0]
    request = {"microbatches": microbatches, "memory_bytes": 6 * whole // 10, "recompute": "never"}
    best = plan(graph, devices(8), **request)
    assert best.schedule == schedule and min(best.replicas) > 1
    assert best.num_ranks == 8 < sum(best.replicas)
    plain = plan(graph, devices(8), schedule="1f1b", replicas="any", **request)
    assert best.step_seconds < plain.step_seconds


def test_given_replicas_say_how_many_stages_there_are():
    graph = chain(12)
    planned = plan(
        graph, devices(4), microbatches=8, schedule="interleaved-1f1b", replicas="2-2-2-2-2-2"
    )
    assert planned.options == {"stages_per_rank": 3, "replicas": [2] * 6}
    assert planned.num_ranks == 4


def test_sums_are_counted():
    """Weights of the copies of a rank are summed, those of all of its stages."""
    cluster = devices(4)
    linked = cluster.__class__(
        devices=cluster.devices,
        groups=(
            Group(
                name="net",
                members=tuple(device.name for device in cluster.devices),
                link=Link(bytes_per_second=1e6),
            ),
        ),
    )
    request = {"microbatches": 8, "schedule": "interleaved-1f1b", "replicas": "2-2-2-2"}
    fast = plan(chain(8), devices(4), **request)
    slow = plan(chain(8, parameter_bytes=10**5), linked, **request)
    assert all(stage.reduce_seconds for stage in slow.stages)
    assert slow.step_seconds > fast.step_seconds + min(s.reduce_seconds for s in slow.stages)


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ("2-1", "interleaved-1f1b: replicas are 2-1, but its pipelines stand side by side"),
        ("3-3-3-3", "interleaved-1f1b makes no 4 stages with 3 replicas each of 4 devices"),
        ("2-2-2", "interleaved-1f1b makes no 3 stages with 2 replicas each of 4 devices"),
    ],
)
def test_replicas_that_cannot_be(replicas, message):
    request = {"microbatches": 8, "schedule": "interleaved-1f1b", "replicas": replicas}
    with pytest.raises((InputError, PlanError), match=message):
        plan(chain(8), devices(4), **request)


def test_a_schedule_is_built_once_for_all_tasks_made_of_one():
    task = Task(chain(4), devices(4), 8)
    offer = Offer("zb-h1", (0, 1, 2, 3))
    others = replace(task, reducer="sharded"), replace(task, memory_bytes=10**9)
    schedules = [offer.setting(own).schedule for own in (task, *others)]
    assert all(schedule is schedules[0] for schedule in schedules)
