"""What holds for every fleet, simulated: no order beats the bound, and longest first comes near."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as pk
from penstock.base.errors import InputError
from penstock.planning.turns import POLICIES, StageVisit, TimedJob, simulate_fleet
from penstock.planning.turns.simulator import bound_of
from tests.kit.examples import examples

seconds = st.sampled_from((1.0, 2.0, 3.0, 5.0, 8.0))
nothing = st.just(0.0)


def visits(transfer):
    return st.lists(
        st.builds(
            StageVisit, st.integers(0, 3), st.booleans(), seconds, transfer, transfer, transfer
        ),
        min_size=1,
        max_size=5,
    )


@st.composite
def fleets(draw, transfer=nothing):
    count = draw(st.integers(1, 7))
    return [
        TimedJob(f"j{number}", draw(visits(transfer)), draw(st.integers(1, 4)))
        for number in range(count)
    ]


@examples(150)
@given(tasks=fleets(), devices=st.integers(1, 4))
def test_longest_first_ends_within_a_unit_of_the_bound(tasks, devices):
    least = bound_of(tasks, devices)
    took = simulate_fleet(tasks, devices).makespan
    assert least.seconds - 1e-9 <= took <= least.seconds + least.unit + 1e-9


@examples(60)
@given(
    tasks=fleets(st.sampled_from((0.0, 0.5))),
    devices=st.integers(1, 3),
    policy=st.sampled_from(POLICIES),
    data=st.data(),
)
def test_jobs_that_can_compute_on_one_device_only_stay_there(tasks, devices, policy, data):
    """As on accelerators; a device then has at least its own jobs' work to do."""
    homes = {task.name: data.draw(st.integers(0, devices - 1)) for task in tasks}
    tasks = [task._replace(only=homes[task.name]) for task in tasks]
    timeline = simulate_fleet(tasks, devices, policy)
    assert all(turn.device == homes[turn.job] for turn in timeline.turns)
    assert len(timeline.turns) == sum(task.steps * len(task.visits) for task in tasks)
    for device in range(devices):
        own = (task for task in tasks if task.only == device)
        assert timeline.makespan >= sum(task.steps * task.step_seconds for task in own) - 1e-9


@examples(80)
@given(
    tasks=fleets(st.sampled_from((0.0, 0.5, 4.0))),
    devices=st.integers(1, 4),
    policy=st.sampled_from(POLICIES),
    ahead=st.booleans(),
)
def test_every_visit_happens_once_in_order_and_nobody_is_idle_for_nothing(
    tasks, devices, policy, ahead
):
    timeline = simulate_fleet(tasks, devices, policy, ahead=ahead)
    assert timeline.makespan >= bound_of(tasks, devices).seconds - 1e-9
    for task in tasks:
        own = [turn for turn in timeline.turns if turn.job == task.name]
        expected = [(step, visit) for step in range(task.steps) for visit in task.visits]
        assert [(turn.step, turn.stage, turn.backward) for turn in own] == [
            (step, visit.stage, visit.backward) for step, visit in expected
        ]
        for before, after in itertools.pairwise(own):
            assert before.end <= after.start
        if policy == "whole":
            assert len({turn.device for turn in own}) == 1
    for row in timeline.by_device:
        for before, after in itertools.pairwise(row):
            assert before.end <= after.start
    if policy != "whole":
        _nobody_waits_beside_an_idle_device(timeline, tasks)


def _nobody_waits_beside_an_idle_device(timeline, tasks):
    """At every moment, so many devices have a turn as there are jobs left, or all of them."""
    moments = sorted({turn.start for turn in timeline.turns} | {t.end for t in timeline.turns})
    ends = timeline.job_ends
    for early, late in itertools.pairwise(moments):
        middle = (early + late) / 2
        busy = sum(turn.start < middle < turn.end for turn in timeline.turns)
        left = sum(ends[task.name] > middle for task in tasks)
        assert busy == min(left, timeline.num_devices)


def test_a_stage_is_fetched_while_another_job_computes():
    """Two jobs on one device, each fetch as long as a visit: hidden, but the very first one."""
    own = [StageVisit(stage, False, 1.0, 1.0) for stage in range(3)]
    tasks = [TimedJob("a", own, 2), TimedJob("b", own, 2, "another disk")]
    hidden = simulate_fleet(tasks, 1)
    assert hidden.makespan == bound_of(tasks, 1).seconds + 1 == 13
    assert simulate_fleet(tasks, 1, ahead=False).makespan == 24
    # On one disk that has to read for as long as all devices compute, it reads all the time.
    shared = [task._replace(tier="") for task in tasks]
    assert bound_of(shared, 2).seconds == bound_of(shared, 2).reading == 12


def test_sharp_gains_what_the_formula_says_over_whole_models():
    """D + 1 equal models on D devices: whole models take two rounds, visits 2D/(D+1) less."""
    for devices in (2, 4, 8):
        tasks = [
            TimedJob(str(job), [StageVisit(s) for s in range(8)], 20) for job in range(devices + 1)
        ]
        whole = simulate_fleet(tasks, devices, "whole").makespan
        gain = whole / simulate_fleet(tasks, devices).makespan
        assert gain == pytest.approx(2 * devices / (devices + 1), rel=0.01)
        many = [TimedJob(str(job), [StageVisit(0)], 5) for job in range(6 * devices)]
        assert (
            simulate_fleet(many, devices, "whole").makespan
            == simulate_fleet(many, devices).makespan
        )


@examples(30)
@given(tasks=fleets(), devices=st.integers(1, 4), policy=st.sampled_from(POLICIES))
def test_halving_halves_at_every_decision(tasks, devices, policy):
    stop = pk.stop.halving("loss", every=2)
    rungs = stop.num_decisions(len(tasks))
    tasks = [task._replace(steps=max(1, 2 * rungs)) for task in tasks]
    timeline = simulate_fleet(tasks, devices, policy, stop)
    steps = dict.fromkeys(timeline.jobs, 0)
    for turn in timeline.turns:
        steps[turn.job] = max(steps[turn.job], turn.step + 1)
    left = len(tasks)
    for rung in range(rungs):
        assert sum(count >= 2 * (rung + 1) for count in steps.values()) == left
        left = -(-left // 2)
    assert len(timeline.ended) == len(tasks) - (2 if len(tasks) > 1 else 1)


def test_what_cannot_be_simulated_is_refused():
    visits = [StageVisit(0)]
    for tasks, devices, policy, match in (
        ([], 1, "longest", "0 visits"),
        ([TimedJob("a", visits, 1)] * 2, 1, "longest", "two jobs are called 'a'"),
        ([TimedJob("a", [], 1)], 1, "longest", "no visits"),
        ([TimedJob("a", visits, 0)], 1, "longest", "a: steps is 0"),
        ([TimedJob("a", visits, 10**9)], 1, "longest", "fewer steps"),
        ([TimedJob("a", visits, 1)], 0, "longest", "devices is 0"),
        ([TimedJob("a", visits, 1)], 1, "shortest", "policy is 'shortest'"),
    ):
        with pytest.raises(InputError, match=match):
            simulate_fleet(tasks, devices, policy)
