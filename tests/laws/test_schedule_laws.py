"""What holds for every schedule, whichever family made it."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock import Costs, Kind, Op, Schedule, check, schedules, simulate
from penstock.base.errors import InputError, ScheduleError
from penstock.core.schedule.lower import (
    add_communication,
    add_free,
    add_recompute,
    add_update,
    lower,
)
from penstock.core.schedule.op import COMMUNICATION, other_end
from tests.kit.examples import examples
from tests.kit.helpers import amounts, compute_only

ranks = st.integers(1, 8)
microbatches = st.integers(1, 32)
# Searches have laws of their own, in test_search_laws.py.
FIXED = [name for name in schedules.names() if name not in schedules.SEARCHED]
every_family = pytest.mark.parametrize("name", FIXED)
seconds = st.floats(0.01, 10)

# Lowered, a schedule has several times the ops.
fewer = examples(8)
fewer_microbatches = st.integers(1, 16)


def build(name, p, m):
    """A family may refuse a combination, but only by saying so."""
    try:
        return schedules.build(name, num_ranks=p, num_microbatches=m)
    except InputError:
        assume(False)


@every_family
@examples(25)
@given(p=ranks, m=microbatches)
def test_each_op_stands_exactly_once(name, p, m):
    schedule = build(name, p, m)
    counts = Counter(op for ops in schedule.ranks for op in ops)
    assert set(counts.values()) == {1}
    assert schedule.num_ranks == p
    assert schedule.num_microbatches == m
    for stage in range(schedule.num_stages):
        for k in range(m):
            for part in range(schedule.num_slices):
                kinds = {kind for kind in Kind if Op(stage, kind, k, part) in counts}
                assert kinds in ({"F", "B"}, {"F", "I", "W"})


@every_family
@fewer
@given(p=ranks, m=fewer_microbatches, capacity=st.sampled_from([0, 1, 2, 3, None]))
def test_no_deadlock_at_any_capacity(name, p, m, capacity):
    schedule = build(name, p, m)
    check(schedule)
    lowered = lower(schedule, capacity)
    check(lowered, capacity)
    assert compute_only(lowered) == schedule


def all_ranks_finish(schedule):
    """Whether ranks come to their ends where nothing holds a message: it passes when its receive is
    posted, behind those that were sent before it from the same rank to the same rank."""
    left = [list(ops) for ops in schedule.ranks]
    sent, done, moved = defaultdict(list), set(), True
    while moved:
        moved = False
        for rank, ops in enumerate(left):
            while ops and may_happen(schedule, rank, ops[0], sent, done):
                op = ops.pop(0)
                done.add(op)
                if "SEND" in op.kind:
                    receive = other_end(op)
                    sent[rank, schedule.where[receive]].append(receive)
                moved = True
    return not any(left)


def may_happen(schedule, rank, op, sent, done):
    if "RECV" not in op.kind:
        needed = schedule.dependencies(op)
        return all(need in done for need in needed if schedule.where.get(need, rank) == rank)
    queue = sent[schedule.where[other_end(op)], rank]
    if queue[:1] != [op]:
        return False
    del queue[0]
    return True


@pytest.mark.parametrize("name", ["1f1b", "interleaved-zb", "zb-v", "hanayo", "chimera"])
@examples(40)
@given(
    p=st.integers(1, 4),
    m=st.integers(1, 6),
    moves=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 99), st.integers(-6, 6)), max_size=6
    ),
    capacity=st.sampled_from([0, None]),
)
def test_check_knows_what_a_simulation_of_channels_that_hold_nothing_finds(
    name, p, m, moves, capacity
):
    schedule = add_communication(build(name, p, m), capacity)
    rows = [list(ops) for ops in schedule.ranks]
    for rank, place, distance in moves:
        row = rows[rank % len(rows)]
        messages = [index for index, op in enumerate(row) if op.kind in COMMUNICATION]
        if messages:
            start = messages[place % len(messages)]
            row.insert(max(0, start + distance), row.pop(start))
    changed = Schedule.of(rows, schedule.name)
    try:
        check(changed, capacity=0)
    except ScheduleError:
        assert not all_ranks_finish(changed)
    else:
        assert all_ranks_finish(changed)


@every_family
@fewer
@given(p=ranks, m=fewer_microbatches)
def test_passes_keep_the_order_of_compute(name, p, m):
    schedule = build(name, p, m)
    for add in (add_recompute, add_free, add_update, add_communication, lower):
        lowered = add(schedule)
        assert compute_only(lowered) == schedule
        check(lowered)
    assert lowered != schedule


@every_family
@fewer
@given(p=ranks, m=fewer_microbatches)
def test_what_is_printed_reads_back(name, p, m):
    schedule = build(name, p, m)
    lowered = lower(add_recompute(schedule))
    assert Schedule.parse(str(schedule)) == schedule
    assert Schedule.parse(str(lowered)) == lowered


@every_family
@fewer
@given(p=ranks, m=fewer_microbatches, f=seconds, i=seconds, w=seconds, hop=amounts(3))
def test_explicit_communication_does_not_change_the_times(name, p, m, f, i, w, hop):
    schedule = build(name, p, m)
    costs = Costs(f, i, w, hop)
    expected = {span.op: span for span in simulate(schedule, costs).spans}
    lowered = {span.op: span for span in simulate(lower(schedule), costs).spans}
    assert {op: lowered[op] for op in expected} == expected


@every_family
@fewer
@given(p=ranks, m=microbatches)
def test_a_rank_runs_one_op_at_a_time_and_after_what_it_needs(name, p, m):
    schedule = build(name, p, m)
    timeline = simulate(schedule, Costs(1, 2, 3, hop=0.5))
    spans = {span.op: span for span in timeline.spans}
    for own in timeline.by_rank:
        assert all(before.end <= after.start for before, after in pairwise(own))
    for op, span in spans.items():
        for needed in schedule.dependencies(op):
            hop = 0.5 if spans[needed].rank != span.rank else 0
            assert spans[needed].end + hop <= span.start


@st.composite
def broken(draw):
    """A schedule with one op dropped, doubled or renamed, or moved behind what waits for it."""
    name = draw(st.sampled_from(FIXED))
    schedule = build(name, draw(st.integers(2, 5)), draw(st.integers(1, 8)))
    if draw(st.booleans()):
        schedule = add_communication(schedule)
    rows = [list(ops) for ops in schedule.ranks]
    row = draw(st.sampled_from(rows))
    at = draw(st.integers(0, len(row) - 1))
    how = draw(st.sampled_from(["drop", "double", "rename", "reorder"]))
    if how == "drop":
        del row[at]
    elif how == "double":
        draw(st.sampled_from(rows)).append(row[at])
    elif how == "rename":
        row[at] = row[at]._replace(microbatch=row[at].microbatch + draw(st.integers(1, 10**9)))
    else:
        # A backward before its own forward can never run, whatever the other ranks do.
        backward = next(k for k, op in enumerate(row) if op.kind in "BI")
        forward = row.index(row[backward]._replace(kind=Kind.FORWARD))
        row[forward], row[backward] = row[backward], row[forward]
    return Schedule.of(rows)


@given(broken())
def test_a_broken_schedule_is_refused_and_never_hangs(schedule):
    with pytest.raises(ScheduleError):
        check(schedule)


@every_family
def test_no_op_can_be_left_out_or_repeated(name):
    schedule = add_communication(schedules.build(name, num_ranks=2, num_microbatches=4))
    for rank, ops in enumerate(schedule.ranks):
        for at, op in enumerate(ops):
            for row in ((*ops[:at], *ops[at + 1 :]), (*ops, op)):
                rows = (*schedule.ranks[:rank], row, *schedule.ranks[rank + 1 :])
                with pytest.raises(ScheduleError):
                    check(Schedule.of(rows))


@given(p=st.integers(2, 6), m=microbatches, data=st.data())
def test_two_ops_exchanged_either_run_or_are_refused(p, m, data):
    schedule = build(data.draw(st.sampled_from(FIXED)), p, m)
    rows = [list(ops) for ops in schedule.ranks]
    row = data.draw(st.sampled_from(rows))
    first, second = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
    row[first], row[second] = row[second], row[first]
    exchanged = Schedule.of(rows)
    try:
        check(exchanged)
    except ScheduleError as error:
        assert "deadlocks" in str(error)
        with pytest.raises(ScheduleError):
            simulate(exchanged)
    else:
        assert simulate(exchanged).makespan > 0
