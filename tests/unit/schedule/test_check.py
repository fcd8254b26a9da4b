import pytest

from penstock import Schedule, check, schedules, simulate
from penstock.base.errors import InputError, ScheduleError


def refused(text, **options):
    with pytest.raises(ScheduleError) as caught:
        check(Schedule.parse(text), **options)
    return str(caught.value)


def test_a_deadlock_names_who_waits_for_what():
    assert refused("0F0,0B0\n1B0,1F0") == (
        "schedule deadlocks: rank 0 waits to run 0B0 for 1B0; rank 1 waits to run 1B0 for 1F0"
    )


def test_a_deadlock_across_microbatches():
    message = refused("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    assert message == (
        "schedule deadlocks: rank 0 waits to run 0B0 for 1B0; rank 1 waits to run 1F1 for 0F1"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0,0B0", "0B0 stand(s) more than once"),
        ("0F0,0B0\n0F0", "0F0 stand(s) more than once"),
        ("0F0,0B0,0F1", "0B1 missing"),
        ("0F0,0F1,0B0,0B2,0B1", "0F2 missing"),
        ("0F0,0I0", "0W0 missing"),
        ("0F0,0W0", "0I0 missing"),
        ("0F0,0B0\n2F0,2B0", "1B0, 1F0 missing"),
        ("0F0,0I0,0W0,0B0", "0B0 also split into I or W"),
        ("0F0\n0B0", "stage 0, microbatch 0 is spread over ranks [0, 1]"),
    ],
)
def test_incomplete_or_contradictory(text, message):
    assert message in refused(text)


def test_a_schedule_without_ops():
    with pytest.raises(ScheduleError, match="no ops"):
        check(Schedule.of([[], []]))


@pytest.mark.parametrize(
    ("text", "mistyped"),
    [
        ("0F0,0B0,0UPDATE2147483647", "0UPDATE2147483647"),
        ("1F0,1B0\n0F0,0B0,0FREE99999999", "0FREE99999999"),
    ],
)
def test_a_number_far_beyond_all_others_takes_no_memory(text, mistyped):
    message = refused(text)
    assert message == f"{mistyped} is far beyond all other ops; is a number mistyped?"


def test_a_mistyped_microbatch_is_not_searched_for_ever():
    message = refused("0F0,0B0,0F999999999,0B999999999")
    assert message.startswith("0B1, 0B2, 0B3, 0F1, 0F2 and more missing")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0SEND_F0,0B0\n1F0,1B0", "0SEND_F0, but no rank has its other end, 1RECV_F0"),
        ("1RECV_F0,1F0,1B0\n0F0,0B0", "1RECV_F0, but no rank has its other end, 0SEND_F0"),
        (
            "0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0",
            "rank 0 runs 0B0, which needs 1B0 of rank 1, but nothing receives it",
        ),
    ],
)
def test_half_explicit_communication(text, message):
    assert message in refused(text)


def test_a_full_channel_can_deadlock():
    # Rank 1 takes nothing before rank 0 has put both in: one place is not enough for that.
    text = (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B1,0B1,0RECV_B0,0B0\n"
        "1RECV_F1,1F1,1B1,1SEND_B1,1RECV_F0,1F0,1B0,1SEND_B0"
    )
    check(Schedule.parse(text))
    check(Schedule.parse(text), capacity=2)
    assert "rank 0 waits to run 0SEND_F1 for 1RECV_F0" in refused(text, capacity=1)


def test_a_receive_that_overtakes_another_deadlocks_where_messages_pass_in_order():
    text = (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B1,0B1,0RECV_B0,0B0\n"
        "1RECV_F1,1F1,1B1,1SEND_B1,1RECV_F0,1F0,1B0,1SEND_B0"
    )
    assert "rank 1 waits to run 1RECV_F1 for 1RECV_F0" in refused(text, capacity=0)
    check(
        Schedule.parse(
            text.replace("1RECV_F1,1F1", "1RECV_F0,1RECV_F1,1F1").replace(
                "1SEND_B1,1RECV_F0", "1SEND_B1"
            )
        ),
        capacity=0,
    )


def test_a_channel_does_not_hold_less_than_nothing():
    schedule = schedules.build("gpipe", num_ranks=2, num_microbatches=2)
    with pytest.raises(InputError, match="capacity is -1"):
        check(schedule, capacity=-1)


def test_what_an_incomplete_schedule_lacks_is_named_where_it_is_simulated():
    with pytest.raises(ScheduleError, match="rank 0: 1F0 needs 0F0, which is not in the schedule"):
        simulate(Schedule.parse("1F0"))
