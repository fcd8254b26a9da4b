import pytest

from penstock import Costs, Schedule, check, schedules, simulate
from penstock.base.errors import InputError, ScheduleError
from penstock.core.schedule import lower as passes
from penstock.core.schedule.lower import (
    add_communication,
    add_free,
    add_recompute,
    add_reduce,
    add_update,
    forward_only,
    lower,
    split_backward,
)
from tests.kit.helpers import compute_only


def build(name="1f1b", p=2, m=2):
    return schedules.build(name, num_ranks=p, num_microbatches=m)


def test_messages_stand_right_beside_the_ops_they_serve():
    assert str(add_communication(build())) == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )


def test_the_gradient_travels_once_the_input_half_is_done():
    split = Schedule.parse("0F0,0I0,0W0\n1F0,1I0,1W0")
    assert str(add_communication(split)) == (
        "0F0,0SEND_F0,0RECV_B0,0I0,0W0\n1RECV_F0,1F0,1I0,1SEND_B0,1W0\n"
    )


def test_a_full_backward_is_its_two_halves():
    assert str(split_backward(build())) == ("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n")
    check(split_backward(build("dualpipe-v", 2, 4)))
    assert split_backward(build("zb-h1")) == build("zb-h1")


def test_an_order_that_deadlocks_is_lowered_all_the_same():
    """What is wrong is for ``check`` to say."""
    sent = add_communication(Schedule.parse("0B0,0F0\n1F0,1B0"))
    assert str(sent) == "0RECV_B0,0B0,0F0,0SEND_F0\n1RECV_F0,1F0,1B0,1SEND_B0\n"


def test_stages_on_one_rank_need_no_messages():
    v_shape = Schedule.parse("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0")
    lowered = add_communication(v_shape)
    check(lowered, capacity=1)
    assert str(lowered).splitlines()[1] == ("1RECV_F0,1F0,2F0,2SEND_F0,2RECV_B0,2B0,1B0,1SEND_B0")


def test_the_update_follows_the_last_gradient_of_its_stage():
    assert str(add_update(build())) == "0F0,0F1,0B0,0B1,0UPDATE1\n1F0,1B0,1F1,1B1,1UPDATE1\n"
    v_shape = Schedule.parse("0F0,1F0,1I0,0I0,0W0,1W0")
    assert str(add_update(v_shape)) == "0F0,1F0,1I0,0I0,0W0,0UPDATE0,1W0,1UPDATE0\n"


TWO_EACH = "0F0,1F0,1B0,0B0,0F1,1F1,1B1,0B1"
"""Two stages on one rank, two microbatches."""


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({}, "1F1,1B1,1UPDATE1,0B1,0UPDATE1"),
        ({"last": {1}}, "1F1,1B1,0B1,0UPDATE1,1UPDATE1"),
        ({"last": {0}}, "1F1,1B1,1UPDATE1,0B1,0UPDATE1"),
        ({"last": {0, 1}}, "1F1,1B1,0B1,1UPDATE1,0UPDATE1"),
        ({"together": True}, "1F1,1B1,0B1,1UPDATE1,0UPDATE1"),
    ],
)
def test_which_updates_come_last(options, ends):
    updated = add_update(Schedule.parse(TWO_EACH), **options)
    assert str(updated) == f"0F0,1F0,1B0,0B0,0F1,{ends}\n"


@pytest.mark.parametrize("options", [{"last": {0, 3}}, {"together": True}])
def test_which_updates_come_last_in_large_schedules(options):
    """As in small ones, where each stage's update is named after its last microbatch."""
    small, large = (build("zb-v", 2, m) for m in (8, 1000))

    def ends(schedule, **options):
        ranks = add_update(schedule, **options).ranks
        return [[(op.kind, op.stage) for op in ops[-4:]] for ops in ranks]

    assert ends(large, **options) == ends(small, **options) != ends(small)


def test_the_last_gradient_is_sent_before_the_update():
    last = str(add_communication(add_update(build()))).splitlines()[1]
    assert last.endswith("1B1,1SEND_B1,1UPDATE1")


def test_forward_only_runs_on_its_own():
    forward = add_communication(forward_only(build("gpipe")))
    assert str(forward) == "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n"


def test_compute_only_undoes_the_others():
    assert compute_only(add_communication(add_update(build()))) == build()


def test_memory_is_freed_behind_the_last_use():
    split = Schedule.parse("0F0,0I0,0W0")
    assert str(add_free(split)) == "0F0,0I0,0FREE_I0,0W0,0FREE0\n"
    assert str(add_free(Schedule.parse("0F0,0B0"))) == "0F0,0B0,0FREE0\n"


def test_a_gradient_leaves_before_anything_else_follows():
    last = str(lower(Schedule.parse("0F0,0B0\n1F0,1B0"))).splitlines()[1]
    assert last == "1RECV_F0,1F0,1B0,1SEND_B0,1FREE0,1UPDATE0"


def test_a_forward_is_run_again_right_before_its_backward():
    again = add_communication(add_recompute(build(), stages=[0]))
    assert str(again).splitlines()[0] == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0R0,0RECV_B0,0B0,0R1,0RECV_B1,0B1"
    )
    assert "R" not in str(again).splitlines()[1].replace("RECV", "")
    check(again, capacity=1)
    with pytest.raises(InputError, match="cannot recompute stage 2: the schedule has 2 stages"):
        add_recompute(build(), stages=[1, 2])


COPIES = Schedule.parse("0F0,1F1,1B1,0B0\n1F0,1B0,0F1,0B1")
"""Two stages on two ranks, both ways: each stage has two copies."""


def test_copies_of_a_stage_reduce_before_they_update():
    check(COPIES)
    reduced = add_update(add_reduce(COPIES))
    assert str(reduced) == (
        "0F0,1F1,1B1,1REDUCE1,0B0,0REDUCE0,1UPDATE1,0UPDATE0\n"
        "1F0,1B0,1REDUCE0,0F1,0B1,0REDUCE1,1UPDATE0,0UPDATE1\n"
    )
    check(lower(COPIES, capacity=1), capacity=1)
    assert add_update(COPIES) == reduced
    assert add_reduce(build()) == build()


def test_an_update_waits_for_the_copies_and_their_sum():
    reduced = add_update(add_reduce(COPIES))
    ends = {str(span.op): span.end for span in simulate(reduced, Costs(reduce=0.5)).spans}
    for stage in (0, 1):
        summed = max(ends[f"{stage}REDUCE{k}"] for k in (0, 1)) + 0.5
        assert max(ends[f"{stage}UPDATE{k}"] for k in (0, 1)) >= summed


def test_a_gradient_that_comes_after_the_update_is_refused():
    with pytest.raises(ScheduleError, match="rank 0 needs 0UPDATE1 behind 0B0, its last gradient"):
        check(Schedule.parse("0F0,0F1,0B1,0UPDATE1,0B0"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0,0UPDATE0\n1F0,1B0", "rank 1 needs 1UPDATE0 behind 1B0"),
        ("0F0,0B0,0F1,0B1,0UPDATE1,0F2,0B2", "rank 0 needs 0UPDATE2 behind 0B2"),
        ("0F0,0B0,0UPDATE0\n0F1,0B1,0UPDATE1", "rank 0 needs 0REDUCE0 behind 0B0"),
        ("0F0,0B0,0REDUCE0,0UPDATE0\n0F1,0B1,0UPDATE1", "rank 1 needs 0REDUCE1 behind 0B1"),
        ("0F0,0B0,0REDUCE0,0UPDATE0\n0F1,0B1,0REDUCE1", "rank 1 needs 0UPDATE1 behind 0B1"),
        ("0F0,0B0,0F1,0R1,0B1", "0F0 keeps only its input, .* but 0R0 is missing"),
        ("0F0,0I0,0W0,0FREE0,0FREE_I0", "deadlocks: rank 0 waits to run 0FREE0 for 0FREE_I0"),
    ],
)
def test_half_a_pass_is_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        check(Schedule.parse(text))


@pytest.mark.parametrize("name", ["add_recompute", "add_free", "add_update", "add_communication"])
def test_a_pass_is_applied_once(name):
    once = getattr(passes, name)(build())
    with pytest.raises(ScheduleError, match="already; apply each pass once"):
        getattr(passes, name)(once)
    with pytest.raises(ScheduleError, match=r"\dREDUCE\d already"):
        add_reduce(add_reduce(COPIES))


@pytest.mark.parametrize("capacity", [-1, 1.5, "1", True, float("nan")])
def test_a_channel_holds_a_whole_number_of_messages(capacity):
    for use in (lambda: lower(build(), capacity), lambda: check(build(), capacity)):
        with pytest.raises(InputError, match=r"capacity is .* a whole number of messages"):
            use()


def test_a_capacity_bounds_a_schedule_without_messages_too():
    schedule = schedules.build("breadth-first", num_ranks=4, num_microbatches=16)
    check(schedule, 1)
    with pytest.raises(ScheduleError, match=r"channels that hold 1 message\(s\).* allow more, or"):
        check(add_communication(schedule), 1)
    check(add_communication(schedule), 4)


def test_what_is_never_freed_is_named():
    with pytest.raises(ScheduleError, match="0F1 is never freed: 0FREE1 is missing"):
        check(Schedule.parse("0F0,0B0,0FREE0,0F1,0B1"))


def test_a_receive_comes_early_only_where_a_full_channel_would_stop_everything():
    schedule = schedules.build("breadth-first", num_ranks=2, num_microbatches=4)
    plain, early = add_communication(schedule), add_communication(schedule, capacity=1)
    check(plain)
    with pytest.raises(ScheduleError, match="deadlocks"):
        check(plain, capacity=1)
    check(early, capacity=1)
    assert compute_only(early) == schedule
    # Every receive that moved went to the front.
    for before, after in zip(plain.ranks, early.ranks, strict=True):
        places = [(before.index(op), after.index(op)) for op in before if "RECV" in op.kind]
        assert any(new < old for old, new in places)
    one_f_one_b = build("1f1b", 4, 8)
    assert add_communication(one_f_one_b, capacity=1) == add_communication(one_f_one_b)


def test_where_messages_pass_in_the_order_of_their_sends_receives_follow_it():
    schedule = schedules.build("zb-v", num_ranks=2, num_microbatches=4)
    plain, in_order = add_communication(schedule), add_communication(schedule, capacity=0)
    check(plain)
    with pytest.raises(ScheduleError, match="pass in the order of their sends, schedule deadlocks"):
        check(plain, capacity=0)
    check(in_order, capacity=0)
    check(schedule, capacity=0)
    assert compute_only(in_order) == schedule
    assert [len(ops) for ops in in_order.ranks] == [len(ops) for ops in plain.ranks]
    one_f_one_b = build("1f1b", 4, 8)
    assert add_communication(one_f_one_b, capacity=0) == add_communication(one_f_one_b)


def test_large_schedules_are_ordered_for_channels_that_hold_nothing_like_small_ones():
    small, large = (build("zb-v", 2, m) for m in (8, 1000))
    for schedule in (small, large):
        in_order = add_communication(schedule, capacity=0)
        check(in_order, capacity=0)
        with pytest.raises(ScheduleError):
            check(add_communication(schedule), capacity=0)
