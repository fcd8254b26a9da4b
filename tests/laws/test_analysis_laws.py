"""What holds when a timeline is taken apart, whatever its schedule and costs."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock import Costs, Kind, Span, Timeline, schedules, simulate
from penstock.base.errors import InputError
from penstock.core.schedule.lower import add_recompute, add_update, lower
from penstock.core.timing import find_parting, idle_of, measured_costs
from penstock.core.timing.spans import BUSY
from tests.kit.helpers import amounts
from tests.oracles import op_by_op

FIXED = [name for name in schedules.names() if name not in schedules.SEARCHED]
seconds = st.floats(0.1, 10)
fewer = settings(max_examples=80, deadline=None)


free_hops = st.just(0.0)


@st.composite
def runs(draw, hop=free_hops, least_microbatches=1):
    """(schedule, costs) with a cost per stage; compute only, or lowered."""
    name, p = draw(st.sampled_from(FIXED)), draw(st.integers(1, 4))
    m = draw(st.integers(least_microbatches, 8))
    try:
        schedule = schedules.build(name, num_ranks=p, num_microbatches=m)
    except InputError:
        assume(False)
    schedule = draw(st.sampled_from([add_update, lower]))(schedule)
    per_stage = st.lists(seconds, min_size=schedule.num_stages, max_size=schedule.num_stages)
    costs = Costs(
        *(draw(per_stage) for _ in range(3)), hop=draw(hop), update=draw(seconds),
        reduce=draw(hop),
    )  # fmt: skip
    return schedule, costs


def jittered(schedule, costs, draw):
    """A step in which every op takes another time, recorded like a real one."""
    factors = draw(st.lists(st.floats(0.3, 3), min_size=7, max_size=7))

    class Jitter(Costs):
        def duration(self, op):
            return super().duration(op) * factors[hash((op.stage, op.microbatch)) % 7]

    jitter = Jitter(costs.forward, costs.backward_input, costs.backward_weight, costs.hop)
    timeline = op_by_op.simulate(schedule, jitter)
    return Timeline(timeline.rows, timeline.name, "measured")


def close(value, timeline):
    return pytest.approx(value, abs=1e-9 * (1 + timeline.makespan))


@fewer
@given(runs(hop=amounts(5)), st.data())
def test_the_parts_of_the_idle_time_add_up_to_it(run, data):
    for timeline in (simulate(*run), jittered(*run, data.draw)):
        for idle, busy in zip(idle_of(timeline), timeline.busy, strict=True):
            assert min(idle) >= 0
            assert idle.total == close(timeline.makespan - busy, timeline)


@fewer
@given(runs())
def test_with_exact_costs_and_free_messages_all_idle_time_is_bubble(run):
    timeline = simulate(*run)
    for idle in idle_of(timeline):
        assert (idle.waiting, idle.communication) == (close(0, timeline), close(0, timeline))


@fewer
@given(runs(hop=st.floats(0.1, 5)))
def test_with_exact_costs_what_hops_add_to_the_step_is_communication(run):
    schedule, costs = run
    timeline = simulate(schedule, costs)
    free = simulate(schedule, Costs(
        costs.forward, costs.backward_input, costs.backward_weight, update=costs.update
    ))  # fmt: skip
    for idle, without in zip(idle_of(timeline), idle_of(free), strict=True):
        assert idle.communication == close(timeline.makespan - free.makespan, timeline)
        assert idle.waiting == close(0, timeline)
        assert idle.bubble == close(without.bubble, timeline)


@fewer
@given(runs(least_microbatches=3), st.data())
def test_what_one_slow_op_adds_to_the_step_is_waiting_on_the_other_ranks(run, data):
    schedule, costs = run
    usual = simulate(schedule, costs)
    slow = data.draw(st.sampled_from([s for s in usual.spans if s.op.kind is Kind.FORWARD]))
    assume(sum(op.stage == slow.op.stage and op.kind is Kind.FORWARD
               for op in schedule.ranks[slow.rank]) >= 3)  # fmt: skip

    class OneSlow(Costs):
        def duration(self, op):
            return super().duration(op) * (5 if op == slow.op else 1)

    fields = ("forward", "backward_input", "backward_weight", "hop", "update")
    timeline = op_by_op.simulate(
        schedule, OneSlow(**{name: getattr(costs, name) for name in fields})
    )
    longer = timeline.makespan - usual.makespan
    for rank, idle in enumerate(idle_of(timeline)):
        assert idle.communication == close(0, timeline)
        if rank != slow.rank:
            assert idle.waiting == close(longer, timeline)


@fewer
@given(runs(hop=amounts(5)))
def test_measured_costs_give_the_same_timeline_again(run):
    schedule, costs = run
    timeline = simulate(schedule, costs)
    again = simulate(schedule, measured_costs(timeline))
    for one, other in zip(timeline.rows, again.rows, strict=True):
        assert list(other.starts) == close(list(one.starts), timeline)
        assert list(other.ends) == close(list(one.ends), timeline)


@fewer
@given(runs(hop=amounts(5)))
def test_a_step_as_predicted_parts_nowhere(run):
    timeline = simulate(*run)
    assert find_parting(timeline, Timeline(timeline.rows, source="measured")) is None


@fewer
@given(runs(hop=amounts(5)), st.sampled_from([0.2, 5.0]), st.data())
def test_the_one_op_that_took_another_time_is_found(run, factor, data):
    schedule, costs = run
    predicted = simulate(schedule, costs)
    busy = [s for s in predicted.spans if s.op.kind in BUSY]
    other = data.draw(st.sampled_from(busy))
    length = (other.end - other.start) * abs(factor - 1)
    assume(length > 0.03 * predicted.makespan)

    class OneOther(Costs):
        def duration(self, op):
            return super().duration(op) * (factor if op == other.op else 1)

    fields = ("forward", "backward_input", "backward_weight", "hop", "update", "reduce")
    measured = op_by_op.simulate(
        schedule, OneOther(**{name: getattr(costs, name) for name in fields})
    )
    parting = find_parting(predicted, measured)
    assert parting is not None
    cause = parting.cause
    assert (cause.kind, cause.op, cause.rank) == ("op", other.op, other.rank)
    assert cause.predicted == close(other.end - other.start, predicted)
    assert cause.measured == close((other.end - other.start) * factor, predicted)


def recomputing(name):
    return add_update(add_recompute(schedules.build(name, num_ranks=3, num_microbatches=6)))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "seq1f1b"])
def test_recomputation_has_costs_of_its_own(name):
    schedule = recomputing(name)
    costs = Costs(1.0, 2.0, 0.5, hop=0.25, update=0.125, recompute=1.5)
    timeline = simulate(schedule, costs)
    found = measured_costs(timeline)
    assert list(found.recompute) == pytest.approx([1.5] * 3)
    again = simulate(schedule, found)
    assert again.makespan == pytest.approx(timeline.makespan)


def test_ops_that_start_late_by_a_message_name_it():
    schedule = schedules.build("1f1b", num_ranks=2, num_microbatches=4)
    predicted = simulate(schedule, Costs(hop=0.1))
    late = [
        Span(s.op, s.rank, s.start + 2 * (s.rank == 1), s.end + 2 * (s.rank == 1))
        for s in predicted.spans
    ]
    parting = find_parting(predicted, Timeline.of(late, 2, source="measured"))
    assert str(parting.measured.op) == "1F0"
    assert (parting.cause.kind, str(parting.cause.after), parting.cause.after_rank) == (
        "pause", "0F0", 0,
    )  # fmt: skip
    assert parting.cause.excess == pytest.approx(2)
