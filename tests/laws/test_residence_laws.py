"""What holds for every order in which stages come and go."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock import Costs, Schedule, Timeline, check, draw, schedules, simulate
from penstock.base.errors import InputError, ScheduleError
from penstock.core.schedule import Kind, Op
from penstock.core.schedule.lower import add_communication, add_recompute, add_update
from penstock.core.schedule.op import COMPUTE, FETCHES, LEAVES, RESIDENCE
from penstock.core.schedule.residence import (
    NEED_WEIGHTS,
    StageBytes,
    add_residence,
    resident_bytes,
)
from penstock.planning.plans.spilling import Spill, with_residence
from tests.kit.examples import examples

WHOLE = ("spilled", "gpipe", "1f1b", "interleaved-1f1b", "breadth-first", "hanayo")


@st.composite
def orders(draw, names=WHOLE):
    name = draw(st.sampled_from(names))
    options = {}
    if name in ("spilled", "interleaved-1f1b", "breadth-first"):
        options["stages_per_rank"] = draw(st.integers(1, 4))
    if name == "spilled":
        options["group"] = draw(st.integers(0, 5))
    count = draw(st.integers(1, 6))
    try:
        schedule = schedules.build(
            name, num_ranks=draw(st.integers(1, 4)), num_microbatches=count, **options
        )
    except InputError:
        assume(False)
    if draw(st.booleans()):
        schedule = add_recompute(schedule)
    return schedule


spills = st.builds(Spill, ahead=st.integers(0, 4))


@examples(60)
@given(schedule=orders(), spill=spills, agrees=st.booleans())
def test_every_op_finds_its_weights_and_no_order_of_compute_changes(schedule, spill, agrees):
    lowered = add_communication(with_residence(schedule, spill, agrees=agrees))
    check(lowered)
    assert Schedule.parse(str(lowered)) == lowered
    for before, after in zip(schedule.ranks, lowered.ranks, strict=True):
        kinds = COMPUTE | {Kind.RECOMPUTE}
        assert [op for op in after if op.kind in kinds] == list(before)


@examples(40)
@given(schedule=orders(), spill=spills, data=st.data())
def test_what_is_taken_out_is_missed(schedule, spill, data):
    lowered = with_residence(schedule, spill)
    places = [
        (rank, place)
        for rank, ops in enumerate(lowered.ranks)
        for place, op in enumerate(ops)
        if op.kind in RESIDENCE
    ]
    rank, place = data.draw(st.sampled_from(places))
    ranks = [list(ops) for ops in lowered.ranks]
    del ranks[rank][place]
    with pytest.raises(ScheduleError, match=f"rank {rank}: .*(fetch|leave)"):
        check(Schedule.of(ranks))


@examples(40)
@given(schedule=orders(), spill=spills, agrees=st.booleans(), data=st.data())
def test_room_is_what_a_walk_with_sets_says(schedule, spill, agrees, data):
    """Written once more, from the rules: no class, no stays."""
    lowered = with_residence(schedule, spill, agrees=agrees)
    sizes = st.lists(st.integers(1, 50), min_size=schedule.num_stages, max_size=schedule.num_stages)
    weights, gradients, state = (data.draw(sizes) for _ in range(3))
    stage_bytes = StageBytes(weights, gradients, state)
    for ops in lowered.ranks:
        held = resident_bytes(ops, stage_bytes)
        assert held == _walked(ops, stage_bytes)


def _walked(ops, sizes):  # noqa: C901 - all rules in one place, to be read beside their list
    twice = [*ops, *ops]
    here, leaving, told = set(), set(), []
    needing = [op.stage for op in ops if op.kind in NEED_WEIGHTS]
    cyclic = needing[0] == needing[-1]
    amounts = {"w": sizes.weights, "g": sizes.gradients, "s": sizes.state}
    last = max(place for place, op in enumerate(ops) if op.kind in NEED_WEIGHTS)
    for place, op in enumerate(twice):
        own = []
        if op.kind in FETCHES or op.kind in LEAVES:
            own = _stay(twice, place, op)
        elif op.kind is Kind.BACKWARD:
            own = _until_leave(twice, place, op)
        updates = any(other.kind is Kind.UPDATE for other in own)
        late = any(other.kind is Kind.LATE_UPDATE for other in own)
        if op.kind in FETCHES:
            here |= {("w", op.stage)}
            here |= {("s", op.stage), ("g", op.stage)} if late else set()
        if op.kind is Kind.BACKWARD:
            here |= {("g", op.stage)} | ({("s", op.stage)} if updates else set())
        if op.kind in LEAVES:
            stays = cyclic and place % len(ops) > last and op.kind is Kind.LEAVE_BACKWARD
            leaving = set()
            for what in [item for item in here if item[1] == op.stage]:
                if what[0] == "w" and stays:
                    continue
                here.discard(what)
                if what[0] == "g" or updates or (late and what[0] == "w"):
                    leaving.add(what)
        told.append(sum(amounts[what][stage] for what, stage in [*here, *leaving]))
        if op.kind in (Kind.UPDATE, Kind.LATE_UPDATE):
            here.discard(("g", op.stage))
    return told[len(ops) :]


def _stay(ops, place, op):
    """The ops of the stage between a fetch and its leave."""
    step = 1 if op.kind in FETCHES else -1
    ends, own = (LEAVES if step > 0 else FETCHES), []
    for other in ops[place + step :: step]:
        if other.stage == op.stage and other.kind in ends:
            return own
        if other.stage == op.stage:
            own.append(other)
    return own


def _until_leave(ops, place, op):
    """The ops of the stage from here to its leave."""
    own = []
    for other in ops[place:]:
        if other.stage == op.stage:
            if other.kind in LEAVES:
                break
            own.append(other)
    return own


@examples(50)
@given(
    p=st.integers(1, 3),
    v=st.integers(2, 5),
    m=st.integers(1, 6),
    group=st.integers(0, 3),
    agrees=st.booleans(),
    fetch=st.floats(0.125, 4),
    leave=st.floats(0.125, 4),
)
def test_bringing_stages_in_one_visit_ahead_never_takes_longer(
    p, v, m, group, agrees, fetch, leave
):
    """Because what is needed first comes first, whatever was asked for before. With more visits
    ahead a stage may stay between two of them, and is then written later than it could be."""
    costs = Costs(fetch=fetch, fetch_state=2 * fetch, leave=leave, leave_state=2 * leave, update=1)
    options = {"num_ranks": p, "num_microbatches": m, "stages_per_rank": v, "group": group}
    schedule = schedules.build("spilled", **options)
    waiting, ahead = (
        simulate(with_residence(schedule, Spill(ahead=ahead), agrees=agrees), costs).makespan
        for ahead in (0, 1)
    )
    assert ahead <= waiting + 1e-9


def test_state_that_is_needed_now_overtakes_the_stage_that_comes_next():
    """The first stage's weights are on their way when the last one asks for its state."""
    costs = Costs(fetch=3, fetch_state=6, leave=4, leave_state=8, update=1)
    schedule = schedules.build("spilled", num_ranks=1, num_microbatches=1, stages_per_rank=2)
    timeline = simulate(with_residence(schedule, Spill(ahead=1)), costs)
    assert timeline.makespan <= simulate(with_residence(schedule, Spill(ahead=0)), costs).makespan
    reads = sorted(one[2:] for one in timeline.transfers if one.kind == "read")
    reads.sort(key=lambda one: one[2])
    stages_and_seconds = [(stage, end - start) for stage, _, start, end in reads]
    # Weights of 1; of 0, until the backward of 1 begins; the state of 1; the rest of 0; its state.
    assert stages_and_seconds == [(1, 3), (0, 1), (1, 6), (0, 2), (0, 6)]


@examples(30)
@given(
    v=st.integers(2, 6),
    m=st.integers(1, 6),
    fetch=st.floats(0.125, 4),
    leave=st.floats(0.125, 4),
)
def test_a_minibatch_takes_at_least_its_compute_and_at_most_all_transfers_more(v, m, fetch, leave):
    costs = Costs(fetch=fetch, fetch_state=2 * fetch, leave=leave, leave_state=2 * leave, update=1)
    schedule = schedules.build("spilled", num_ranks=1, num_microbatches=m, stages_per_rank=v)
    times = [
        simulate(with_residence(schedule, Spill(ahead=ahead)), costs).makespan for ahead in (0, 1)
    ]
    compute = simulate(add_update(schedule), costs).makespan
    transfers = (2 * v - 1) * fetch + v * 2 * fetch + v * 3 * leave
    assert compute - 1e-9 <= times[1]
    assert times[0] <= compute + transfers + 1e-9


def test_one_rank_visits_each_stage_twice_and_the_ends_once():
    schedule = schedules.build("spilled", num_ranks=1, num_microbatches=5, stages_per_rank=4)
    (ops,) = with_residence(schedule, Spill()).ranks
    fetched = [op.stage for op in ops if op.kind in FETCHES]
    assert fetched == [0, 1, 2, 3, 2, 1, 0]


def test_a_stage_that_is_never_let_go_or_fetched_twice_is_refused():
    text = "0FETCH_F0,0F0,0LEAVE_F0,0FETCH_B0,0B0,0LEAVE_B0"
    check(Schedule.parse(text))
    for wrong, match in (
        (text.replace("0LEAVE_F0,", ""), "fetches what is in memory"),
        (text.replace(",0LEAVE_B0", ""), "never leaves"),
        (text.replace("0FETCH_B0,", ""), "lacks its weights"),
        (text.replace("0FETCH_F0,0F0,0LEAVE_F0", "0F0,0FETCH_F0,0LEAVE_F0"), "lacks its weights"),
    ):
        with pytest.raises(ScheduleError, match=match):
            check(Schedule.parse(wrong))


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_split_backwards_are_refused(name):
    schedule = schedules.build(name, num_ranks=2, num_microbatches=4)
    with pytest.raises(ScheduleError, match="whole backwards"):
        add_residence(schedule)


def test_wrong_stages_and_a_second_time_are_refused():
    schedule = schedules.build("spilled", num_ranks=1, num_microbatches=2)
    with pytest.raises(InputError, match="stage 7 cannot leave"):
        add_residence(schedule, [7])
    with pytest.raises(InputError, match="ahead"):
        add_residence(schedule, ahead=-1)
    with pytest.raises(ScheduleError, match="say it once"):
        add_residence(add_residence(schedule))


def test_some_stages_may_stay():
    schedule = schedules.build("spilled", num_ranks=1, num_microbatches=2, stages_per_rank=3)
    lowered = add_residence(add_update(schedule), [1])
    check(lowered)
    assert {op.stage for op in lowered.ranks[0] if op.kind in RESIDENCE} == {1}
    assert Op(1, Kind.FETCH_FORWARD, 0) in lowered.where


def test_updates_that_are_late_are_drawn(tmp_path):
    schedule = schedules.build("spilled", num_ranks=1, num_microbatches=2, stages_per_rank=3)
    lowered = with_residence(schedule, Spill(), agrees=True)
    timeline = simulate(lowered, Costs(update=1, fetch=1, leave=1))
    assert draw(timeline).splitlines()[1].count("U") == 3
    draw(timeline, tmp_path / "late.svg")
    picture = (tmp_path / "late.svg").read_text()
    assert "U update of the minibatch before" in picture
    assert all(f"{s}LATE_UPDATE0: update of the minibatch before" in picture for s in range(3))
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_only_the_stage_that_updates_a_tied_weight_waits_for_the_others():
    schedule = schedules.build("interleaved-1f1b", num_ranks=1, num_microbatches=2)
    (ops,) = add_update(schedule, last={1}).ranks
    assert [op.stage for op in ops if op.kind is Kind.UPDATE] == [0, 1]
    assert ops[-1] == Op(1, Kind.UPDATE, 1)
    (usual,) = add_update(schedule).ranks
    assert [op.stage for op in usual if op.kind is Kind.UPDATE] == [1, 0]
