"""What holds for every order in which activations leave and come back."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock import Costs, Schedule, Timeline, check, draw, schedules, simulate
from penstock.base.errors import InputError, ScheduleError
from penstock.core.schedule import Kind
from penstock.core.schedule.lower import add_communication, add_recompute, add_update
from penstock.core.schedule.memory import Sizes, peaks
from penstock.core.schedule.offload import add_offload
from penstock.core.schedule.op import BACKWARD, COMPUTE, RELEASING, STASHES
from tests.kit.examples import examples

FAMILIES = (
    "1f1b",
    "gpipe",
    "interleaved-1f1b",
    "breadth-first",
    "hanayo",
    "zb-h1",
    "zb-v",
    "seq1f1b",
)


@st.composite
def orders(draw):
    name = draw(st.sampled_from(FAMILIES))
    options = {}
    if name in ("interleaved-1f1b", "breadth-first"):
        options["stages_per_rank"] = draw(st.integers(1, 3))
    try:
        return schedules.build(
            name,
            num_ranks=draw(st.integers(1, 4)),
            num_microbatches=draw(st.integers(1, 8)),
            **options,
        )
    except InputError:
        assume(False)


def chosen_of(data, schedule):
    return data.draw(st.sets(st.integers(0, schedule.num_stages - 1), min_size=1))


@examples(60)
@given(schedule=orders(), ahead=st.integers(0, 4), data=st.data())
def test_what_leaves_comes_back_and_no_order_of_compute_changes(schedule, ahead, data):
    chosen = chosen_of(data, schedule)
    away = add_offload(schedule, chosen, ahead)
    lowered = add_communication(add_update(away))
    check(lowered)
    assert Schedule.parse(str(lowered)) == lowered
    for before, after in zip(schedule.ranks, away.ranks, strict=True):
        assert [op for op in after if op.kind in COMPUTE] == list(before)
        assert {op.stage for op in after if op.kind in STASHES} <= chosen
        passes = [op for op in after if op.kind in COMPUTE]
        for place, op in enumerate(after):
            if op.kind is Kind.FETCH_STASH:
                behind = [one for one in after[place:] if one.kind in COMPUTE]
                number = next(
                    number
                    for number, one in enumerate(behind)
                    if one.kind in BACKWARD and one[::2] == op[::2] and one.slice == op.slice
                )
                assert number == ahead
                left = after.index(op._replace(kind=Kind.LEAVE_STASH))
                assert after[left - 1] == op._replace(kind=Kind.FORWARD)
                assert left < place
        assert len(passes) == len(before)


@examples(40)
@given(schedule=orders(), ahead=st.integers(0, 3), data=st.data())
def test_what_is_taken_out_is_missed(schedule, ahead, data):
    away = add_offload(schedule, None, ahead)
    places = [
        (rank, place)
        for rank, ops in enumerate(away.ranks)
        for place, op in enumerate(ops)
        if op.kind in STASHES
    ]
    assume(places)
    rank, place = data.draw(st.sampled_from(places))
    ranks = [list(ops) for ops in away.ranks]
    del ranks[rank][place]
    with pytest.raises(ScheduleError, match=r"fetch|LEAVE_S"):
        check(Schedule.of(ranks))


@examples(40)
@given(schedule=orders(), ahead=st.integers(0, 3), data=st.data())
def test_memory_is_what_a_walk_with_sets_says_and_never_more_than_before(schedule, ahead, data):
    away = add_offload(schedule, chosen_of(data, schedule), ahead)
    numbers = st.lists(
        st.integers(1, 50), min_size=schedule.num_stages, max_size=schedule.num_stages
    )
    sizes = Sizes(data.draw(numbers))
    before = peaks(schedule.ranks, sizes, schedule.num_slices)
    after = peaks(away.ranks, sizes, schedule.num_slices)
    for ops, most, without in zip(away.ranks, after, before, strict=True):
        assert most == pytest.approx(_most_held(ops, sizes.activation, schedule.num_slices))
        assert most <= without + 1e-9


def _most_held(ops, sizes, num_slices):
    here, leaving, most = set(), None, 0.0
    for op in ops:
        whose = op.stage, op.microbatch, op.slice
        if op.kind in STASHES:
            leaving = None
        if op.kind in (Kind.FORWARD, Kind.FETCH_STASH):
            here.add(whose)
        elif op.kind is Kind.LEAVE_STASH:
            here.discard(whose)
            leaving = whose
        held = [*here, *([leaving] if leaving else [])]
        most = max(most, sum(sizes[stage] for stage, _, _ in held) / num_slices)
        if op.kind in RELEASING:
            here.discard(whose)
    return most


@examples(40)
@given(
    schedule=orders(),
    ahead=st.integers(0, 3),
    leave=st.floats(0.125, 4),
    fetch=st.floats(0.125, 4),
)
def test_leaving_costs_no_more_than_all_transfers_and_nothing_where_they_take_no_time(
    schedule, ahead, leave, fetch
):
    away = add_offload(schedule, None, ahead)
    compute = simulate(schedule, Costs()).makespan
    assert simulate(away, Costs()).makespan == pytest.approx(compute)
    timeline = simulate(away, Costs(leave_stash=leave, fetch_stash=fetch))
    count = sum(op.kind is Kind.LEAVE_STASH for op in away.where)
    assert compute - 1e-9 <= timeline.makespan
    assert timeline.makespan <= compute + count * (leave + fetch) / schedule.num_slices + 1e-9
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_half_of_the_first_ranks_activations_leave_for_nothing():
    """PipeOffload's observation: where moving takes no longer than a pass, 1F1B hides it, and its
    first rank keeps two microbatches, however many are in flight."""
    schedule = schedules.build("1f1b", num_ranks=8, num_microbatches=32)
    away = add_offload(schedule)
    costs = Costs(leave_stash=1.0, fetch_stash=1.0)
    assert simulate(away, costs).makespan == simulate(schedule, costs).makespan
    assert peaks(schedule.ranks, Sizes((1.0,) * 8))[0] == 8
    assert peaks(away.ranks, Sizes((1.0,) * 8))[0] == 2
    assert "F" in draw(simulate(away, costs))


def test_wrong_stages_a_second_time_and_what_runs_again_are_refused():
    schedule = schedules.build("1f1b", num_ranks=4, num_microbatches=4)
    with pytest.raises(InputError, match="stage 7 cannot leave"):
        add_offload(schedule, [7])
    with pytest.raises(InputError, match="ahead"):
        add_offload(schedule, ahead=-1)
    with pytest.raises(ScheduleError, match="say it once"):
        add_offload(add_offload(schedule))
    with pytest.raises(ScheduleError, match="stage 1 keeps only its input"):
        add_offload(add_recompute(schedule, [1]))
    with pytest.raises(ScheduleError, match=r"0B0 lacks what 0F0 has kept"):
        check(Schedule.parse("0F0,0LEAVE_S0,0B0"))
    with pytest.raises(ScheduleError, match=r"0FETCH_S0 fetches what has not left"):
        check(Schedule.parse("0F0,0FETCH_S0,0LEAVE_S0,0B0"))
