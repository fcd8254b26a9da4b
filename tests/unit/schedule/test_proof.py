"""Check and messages on whole columns against what goes op by op."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Kind, Op, Schedule, check, schedules, simulate
from penstock.base.errors import InputError, ScheduleError
from penstock.core.schedule import needs as columns_needs
from penstock.core.schedule.lower import (
    add_agreement,
    add_communication,
    add_free,
    add_recompute,
    add_reduce,
    add_update,
    add_updates,
    lower,
    split_backward,
)
from penstock.core.schedule.messages import bounded, messages_of
from penstock.core.schedule.needs import Numbers
from penstock.core.schedule.op import COMMUNICATION
from penstock.core.schedule.rounds import Rounds
from tests.oracles import op_by_op

FIXED = [name for name in schedules.names() if name not in schedules.SEARCHED]


def in_rounds(schedule):
    copies = [schedule.copies[stage] for stage in range(schedule.num_stages)]
    return add_updates(schedule, Rounds(tuple(copies)))


PASSES = {
    "nothing": lambda schedule: schedule,
    "halves": split_backward,
    "recompute": add_recompute,
    "free": add_free,
    "reduce": lambda schedule: add_reduce(schedule, shared=[0]),
    "update": add_update,
    "rounds": in_rounds,
    "agreement": lambda schedule: add_agreement(add_update(schedule, together=True)),
    "late agreement": lambda schedule: add_agreement(add_update(schedule), late=True),
    "messages": add_communication,
    "all": lower,
    "all, with recompute": lambda schedule: lower(add_recompute(schedule, [0])),
}


@st.composite
def valid(draw):
    """A schedule of any family, and what passes add."""
    name = draw(st.sampled_from(FIXED))
    options = {}
    if name in ("1f1b", "gpipe", "pipedream") and draw(st.booleans()):
        options["replicas"] = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    ranks = sum(options["replicas"]) if options else draw(st.integers(1, 4))
    ranks += ranks % 2 if name == "chimera" else 0
    count = draw(st.integers(1, 8))
    try:
        built = schedules.build(name, num_ranks=ranks, num_microbatches=count, **options)
    except InputError:
        built = schedules.build(
            name, num_ranks=ranks, num_microbatches=max(count, 2 * ranks, 3), **options
        )
    return PASSES[draw(st.sampled_from(sorted(PASSES)))](built)


def _another(draw, op):
    """An op that differs in one thing."""
    field = draw(st.sampled_from(["stage", "kind", "microbatch", "slice"]))
    if field == "kind":
        return op._replace(kind=draw(st.sampled_from(sorted(Kind))))
    return op._replace(**{field: max(0, getattr(op, field) + draw(st.sampled_from([-1, 1, 5])))})


@st.composite
def perhaps_broken(draw):
    """A valid schedule with up to three mistakes."""
    ranks = [list(ops) for ops in draw(valid()).ranks]
    for _ in range(draw(st.integers(0, 3))):
        rank = draw(st.integers(0, len(ranks) - 1))
        ops = ranks[rank]
        if not ops:
            continue
        place = draw(st.integers(0, len(ops) - 1))
        other = draw(st.integers(0, len(ranks) - 1))
        match draw(st.sampled_from(["drop", "double", "swap", "move", "rank", "change"])):
            case "drop":
                ops.pop(place)
            case "double":
                ranks[other].append(ops[place])
            case "swap":
                with_ = draw(st.integers(0, len(ops) - 1))
                ops[place], ops[with_] = ops[with_], ops[place]
            case "move":
                ops.insert(draw(st.integers(0, len(ops))), ops.pop(place))
            case "rank":
                ranks[other].insert(
                    draw(st.integers(0, len(ranks[other]))), ops.pop(place)
                ) if other != rank else None
            case "change":
                ops[place] = _another(draw, ops[place])
    return Schedule.of(ranks)


def outcome(function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:
        return type(error), str(error)


def sort_of(told):
    """An error but for which of several ops that are absent, or waits, it names first."""
    if told is None or told[0] is not ScheduleError:
        return told
    for common in ("which is not in the schedule", "deadlocks"):
        if common in told[1]:
            return common
    return told[1]


@pytest.mark.parametrize("many_ranks", [1, 100])
@settings(max_examples=150)
@given(schedule=perhaps_broken())
def test_a_schedule_is_right_where_no_op_contradicts(many_ranks, schedule):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns_needs, "_MANY_RANKS", many_ranks)
        expected = outcome(op_by_op.check_each_op, schedule)
        assert sort_of(outcome(check, schedule)) == sort_of(expected)


@pytest.mark.parametrize("many_ranks", [1, 100])
@settings(max_examples=150)
@given(schedule=perhaps_broken(), capacity=st.sampled_from([0, 1, 2, 3]))
def test_channels_are_full_for_columns_when_they_are_for_ops(many_ranks, schedule, capacity):
    if outcome(op_by_op.check_each_op, schedule) is not None:
        return
    expected = outcome(op_by_op.check_room, schedule, capacity)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns_needs, "_MANY_RANKS", many_ranks)
        assert sort_of(outcome(check, schedule, capacity)) == sort_of(expected)


@pytest.mark.parametrize("many_ranks", [1, 100])
@settings(max_examples=150)
@given(schedule=valid(), capacity=st.sampled_from([0, 1, 2, 3, None]))
def test_messages_stand_in_columns_where_they_stand_among_ops(many_ranks, schedule, capacity):
    if COMMUNICATION & schedule.kinds:
        return
    expected = op_by_op.add_communication(schedule, capacity)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns_needs, "_MANY_RANKS", many_ranks)
        assert add_communication(schedule, capacity) == expected


@settings(max_examples=60)
@given(schedule=valid(), capacity=st.integers(1, 4))
def test_sends_wait_for_room_in_columns_as_among_ops(schedule, capacity):
    explicit = COMMUNICATION & schedule.kinds
    sent = schedule if explicit else add_communication(schedule)
    ops = [op for own in sent.ranks for op in own]
    messages = messages_of(schedule.columns)
    needs, _ = bounded(schedule.columns, messages, capacity)
    said = {
        (ops[send], ops[needs.single[send]])
        for send in messages.sends.tolist()
        if needs.single[send] != needs.nothing
    }
    assert said == set(op_by_op.room_needed(sent, capacity))


@pytest.mark.parametrize("many_ranks", [1, 100])
@pytest.mark.parametrize("capacity", [1, 2, 5])
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("name", ["breadth-first", "interleaved-zb", "hanayo", "gpipe"])
def test_receives_of_columns_come_as_early_as_those_of_ops(
    monkeypatch, many_ranks, capacity, ranks, name
):
    schedule = schedules.build(name, num_ranks=ranks, num_microbatches=4 * ranks)
    expected = op_by_op.add_communication(schedule, capacity)
    monkeypatch.setattr(columns_needs, "_MANY_RANKS", many_ranks)
    laid = add_communication(schedule, capacity)
    assert "ranks" not in vars(laid)
    assert laid == expected
    if name == "breadth-first" and capacity == 1:
        assert laid != add_communication(schedule)
    check(laid, capacity)


@pytest.mark.parametrize("many_ranks", [1, 100])
def test_receives_that_stand_in_a_schedule_are_not_moved_to_prove_it(monkeypatch, many_ranks):
    schedule = add_communication(schedules.build("breadth-first", num_ranks=4, num_microbatches=16))
    monkeypatch.setattr(columns_needs, "_MANY_RANKS", many_ranks)
    right = [outcome(check, schedule, capacity) is None for capacity in (1, 3, 4, None)]
    each = (op_by_op.check_room, schedule)
    assert right == [outcome(*each, capacity) is None for capacity in (1, 3, 4)] + [True]
    assert not right[0]


def test_no_op_of_a_large_schedule_is_made_to_check_its_channels():
    schedule = schedules.build("1f1b", num_ranks=8, num_microbatches=1024)
    check(schedule, 1)
    lowered = lower(schedule, 1)
    check(lowered, 1)
    assert lowered.num_ops == 8 * 1024 * 3 + 7 * 1024 * 4 + 8
    for own in (schedule, lowered):
        assert "ranks" not in vars(own)


MISTAKES = {
    "twice": "0F0,0B0,0B0",
    "half a backward": "0F0,0I0",
    "the other half": "0F0,0W0",
    "no backward": "0F0",
    "no forward": "0B0",
    "whole and halves": "0F0,0I0,0W0,0B0",
    "whole and a half": "0F0,0B0,0W0",
    "two ranks": "0F0,0I0\n0W0",
    "never freed": "0F0,0B0,0FREE0,0F1,0B1",
    "not recomputed": "0F0,0R0,0B0,0F1,0B1",
    "updated too soon": "0F0,0B0,0UPDATE0,0F1,0B1",
    "updated in another's name": "0F0,0B0,0F1,0B1,0UPDATE0",
    "not updated": "0F0,0B0,0UPDATE0\n1F0,1B0",
    "copies that are not summed": "0F0,0B0,0UPDATE0\n0F1,0B1,0UPDATE1",
    "a copy that is not summed": "0F0,0B0,0REDUCE0\n0F1,0B1",
    "updated before the sum": "0F0,0B0,0UPDATE0,0REDUCE0\n0F1,0B1,0REDUCE1,0UPDATE1",
    "updated before the agreement": "0F0,0B0,0UPDATE0,0AGREE0",
    "no receive": "0F0,0SEND_F0,0B0\n1F0,1B0",
    "no send": "1RECV_F0,1F0,1B0\n0F0,0B0",
    "a message to nobody": "0F0,0SEND_F0,0B0",
    "no message": "0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0",
    "freed before its part": "0F0,0I0,0FREE_I0,0W0,0FREE0,0F1,0I1,0W1,0FREE1,0FREE_I1",
    "a later slice first": "0F0.1,0F0,0B0.1,0B0",
    "an earlier slice first": "0F0,0F0.1,0B0,0B0.1",
    "ranks that wait for each other": "0F0,0B0\n1B0,1F0",
}


@pytest.mark.parametrize("many_ranks", [1, 100])
@pytest.mark.parametrize("text", MISTAKES.values(), ids=MISTAKES)
def test_each_mistake_is_seen(monkeypatch, many_ranks, text):
    monkeypatch.setattr(columns_needs, "_MANY_RANKS", many_ranks)
    schedule = Schedule.parse(text)
    expected = outcome(op_by_op.check_each_op, schedule)
    assert expected is not None
    assert outcome(check, schedule) == expected


def test_a_replica_without_a_microbatch_in_the_last_round_takes_part():
    schedule = in_rounds(
        schedules.build("pipedream", num_ranks=2, num_microbatches=3, replicas="2")
    )
    assert Op(0, Kind.UPDATE, 3) in schedule.where
    check(schedule)


def test_a_rank_that_hands_in_less_often_is_named():
    schedule = Schedule.parse(
        "0F0,0B0,0REDUCE0,0UPDATE0,0F1,0B1,0REDUCE1,0UPDATE1\n1F0,1B0,1F1,1B1,1REDUCE1,1UPDATE1"
    )
    with pytest.raises(ScheduleError, match=r"0UPDATE1 is update 2 of stage 0.*hands in"):
        check(schedule)


@settings(max_examples=150)
@given(schedule=perhaps_broken())
def test_numbers_are_named_by_the_one_rule(schedule):
    columns = schedule.columns
    ops = [op for own in schedule.ranks for op in own]
    numbers = Numbers(columns)
    if not (numbers.fits and numbers.once):
        assert len(set(ops)) < len(ops)
        return
    assert len(set(ops)) == len(ops)
    said = {}
    for kind, own, needs in numbers.rule():
        for place, op in enumerate(own.tolist()):
            assert ops[op].kind is kind
            said[ops[op]] = [int(need[place]) for need in needs]
    for op in ops:
        if op.kind is Kind.UPDATE:
            continue  # the hand-ins of other ranks are in ``several``
        expected = [
            ops.index(need) if need in schedule.where else numbers.absent
            for need in schedule.dependencies(op)
        ]
        assert [need for need in said[op] if need != numbers.nothing] == expected


@given(schedule=valid())
def test_updates_wait_for_what_the_one_rule_says(schedule):
    ops = [op for own in schedule.ranks for op in own]
    numbers = Numbers(schedule.columns)
    needs = numbers.needs()
    for number, op in enumerate(ops):
        waits = set(needs.several.get(number, [int(needs.single[number])])) - {numbers.nothing}
        expected = set(map(ops.index, schedule.dependencies(op)))
        own = schedule.columns.first[schedule.where[op]]
        assert waits <= expected
        assert all(own <= other < number for other in expected - waits)


@given(schedule=perhaps_broken())
def test_columns_are_the_ops(schedule):
    columns = schedule.columns
    ranks = [columns.ops(slice(*ends)) for ends in pairwise(columns.first)]
    assert Schedule.of(ranks) == schedule
    assert [type(op.kind) for own in ranks for op in own] == [Kind] * columns.count
    assert columns.num_stages == schedule.num_stages
    assert columns.num_microbatches == schedule.num_microbatches
    assert columns.num_slices == schedule.num_slices


@pytest.mark.parametrize(
    "odd",
    [Op(0, "G", 0), Op(0.0, Kind.FORWARD, 0), Op(-1, Kind.FORWARD, 0), Op(0, Kind.FORWARD, 2**40)],
)
def test_ops_of_odd_fields_are_refused(odd):
    with pytest.raises(InputError, match=r"rank 1 has .*must be whole numbers from 0"):
        Schedule.of([[Op(0, Kind.FORWARD, 0)], [Op(0, Kind.FORWARD, 0), odd]])


def test_the_text_of_a_kind_is_the_kind():
    schedule = Schedule.of([[Op(0, "F", np.int64(0))]])
    assert schedule == Schedule.parse("0F0")
    assert type(schedule.ranks[0][0].kind) is Kind


def test_a_mistyped_number_makes_no_endless_table():
    schedule = Schedule.parse("0F0,0B0,0F999999999,0B999999999")
    with pytest.raises(ScheduleError, match="0B1, 0B2, 0B3, 0F1, 0F2 and more missing"):
        check(schedule)
    with pytest.raises(ScheduleError, match="0F999999999 is far beyond all other ops"):
        simulate(schedule)
