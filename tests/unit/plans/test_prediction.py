"""What a plan is predicted to do is worked out once, and only the clock sees that it is kept."""

from __future__ import annotations

import pickle
from copy import copy
from functools import partial

import pytest
from msgspec.structs import replace

from benchmarks.planning.calls import counting, picture
from penstock import Costs, schedules
from penstock.core.versions import Latest, Stash
from penstock.planning.plans import Plan, StagePlan
from penstock.planning.plans.explanation import explain
from penstock.planning.plans.prediction import num_simulated, steady_seconds


def plan_of(schedule="1f1b", **more) -> Plan:
    stages = tuple(
        StagePlan(
            layers=(f"layer{rank}",),
            rank=rank,
            forward_seconds=0.01,
            backward_input_seconds=0.01,
            backward_weight_seconds=0.01,
            update_seconds=0.002,
            activation_bytes=1 << 20,
        )
        for rank in range(3)
    )
    return Plan(model="m", schedule=schedule, num_microbatches=6, stages=stages, **more)


def everything(plan):
    return str(plan), picture(plan), explain(plan), plan.step_seconds, plan.rank_bytes


@pytest.mark.parametrize("task", [str, picture, explain, everything])
def test_a_plan_is_built_checked_and_simulated_at_most_once(task):
    text = plan_of().to_json()
    with counting() as calls:
        task(Plan.from_json(text))
    assert calls["build"] == calls["check"] == 1
    assert calls["simulate"] <= 1


@pytest.mark.parametrize("task", [str, picture, everything])
def test_of_a_plan_without_a_flush_each_length_of_stream_is_simulated_once(task):
    """One to show, one that tells the pace; only an explanation needs one more."""
    text = plan_of("pipedream").to_json()
    with counting() as calls:
        task(Plan.from_json(text))
    longer = task is everything
    assert calls["simulate"] == 2 + longer
    assert calls["build"] == calls["check"] == 3 + longer


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_what_is_kept_is_in_no_file_comparison_or_copy(schedule):
    fresh, asked = plan_of(schedule), plan_of(schedule)
    everything(asked)
    assert asked == fresh
    assert asked.to_json() == fresh.to_json()
    for other in (copy(asked), pickle.loads(pickle.dumps(asked)), replace(asked)):
        assert other == fresh
        assert everything(other) == everything(fresh)
    assert pickle.dumps(asked) == pickle.dumps(fresh)


def test_another_plan_has_another_prediction():
    plan = plan_of()
    before = plan.step_seconds
    slower = replace(plan, stages=tuple(replace(s, forward_seconds=0.1) for s in plan.stages))
    assert plan.recomputing("stage").step_seconds > before
    assert slower.step_seconds > before
    assert slower.rank_bytes == plan.rank_bytes
    streaming = plan_of("pipedream")
    held = streaming.rank_bytes
    assert sum(streaming.with_versions(Latest()).rank_bytes) <= sum(held)


def test_a_schedule_of_the_plans_own_length_is_the_one_that_is_kept():
    plan = plan_of()
    assert plan.build_schedule() is plan.placement
    assert plan.build_schedule(4).num_microbatches == 4
    assert plan.simulate() is plan.simulate()


def test_a_stream_is_looked_at_as_far_as_it_shows_its_beat():
    """An update per microbatch knows no minibatches, yet two whole ones of them were simulated."""
    costs = Costs([1.0, 2.0, 1.0], 1.0, 1.0, hop=0.5, update=0.25)
    build = partial(schedules.build, "pipedream", num_ranks=3)

    def seconds(count):
        return steady_seconds(lambda m: build(num_microbatches=m), Stash(), costs, count, (1, 1, 1))

    assert seconds(10**7) == pytest.approx(10**6 * seconds(10), rel=1e-12)
    assert num_simulated(Stash(), 10**7, (1, 1, 1)) < 10**4
    per_minibatch = Stash(updates="minibatch")
    assert num_simulated(per_minibatch, 10**7, (1, 1, 1)) >= 2 * 10**7
