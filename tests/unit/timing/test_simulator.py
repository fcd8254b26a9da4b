import pytest

from penstock import Costs, Schedule, schedules, simulate
from penstock.base.errors import InputError, ScheduleError
from penstock.core.schedule.lower import add_communication, add_update


def times(text, costs=None, lower=lambda schedule: schedule):
    spans = simulate(lower(Schedule.parse(text)), costs).spans
    return {str(span.op): (span.start, span.end) for span in spans}


def test_by_hand():
    assert times("0F0,0B0\n1F0,1B0", Costs(1, 2, 3, hop=0.5)) == {
        "0F0": (0, 1), "1F0": (1.5, 2.5), "1B0": (2.5, 7.5), "0B0": (8, 13),
    }  # fmt: skip


def test_stages_on_one_rank_pay_no_hop():
    assert times("0F0,1F0,1B0,0B0", Costs(hop=100))["0B0"] == (4, 6)


def test_the_weight_half_need_not_wait_nor_be_waited_for():
    found = times("0F0,0I0,0W0\n1F0,1I0,1W0", Costs(hop=1))
    assert found["1W0"] == (4, 5)
    assert found["0I0"] == (5, 6)


def test_a_receive_is_shown_as_the_wait_it_is():
    found = times("0F0,0B0\n1F0,1B0", Costs(hop=0.5), add_communication)
    assert found["1RECV_F0"] == (0, 1.5)
    assert found["0RECV_B0"] == (1, 5)
    assert found["0SEND_F0"] == (1, 1)


def test_a_cost_per_stage_and_the_update():
    found = times("0F0,0B0\n1F0,1B0", Costs(forward=[1, 5], update=[7, 1]), add_update)
    assert found["1F0"] == (1, 6)
    assert found["0UPDATE0"] == (10, 17)


def test_what_cannot_be_simulated():
    with pytest.raises(ScheduleError, match="deadlocks"):
        simulate(Schedule.parse("0B0,0F0"))
    with pytest.raises(InputError, match="forward has 3 numbers, but the schedule has 2 stages"):
        simulate(
            schedules.build("gpipe", num_ranks=2, num_microbatches=1), Costs(forward=[1, 2, 3])
        )


def test_the_timeline_carries_the_name():
    timeline = simulate(schedules.build("gpipe", num_ranks=2, num_microbatches=1))
    assert (timeline.name, timeline.source, timeline.num_ranks) == ("gpipe", "predicted", 2)
