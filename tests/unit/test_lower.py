from penstock import Schedule, check, schedules
from penstock.schedule.lower import add_communication, add_update, compute_only, forward_only


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


def test_stages_on_one_rank_need_no_messages():
    v_shape = Schedule.parse("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0")
    lowered = add_communication(v_shape)
    check(lowered, capacity=1)
    assert str(lowered).splitlines()[1] == ("1RECV_F0,1F0,2F0,2SEND_F0,2RECV_B0,2B0,1B0,1SEND_B0")


def test_the_update_follows_the_last_gradient_of_its_stage():
    assert str(add_update(build())) == "0F0,0F1,0B0,0B1,0UPDATE1\n1F0,1B0,1F1,1B1,1UPDATE1\n"
    v_shape = Schedule.parse("0F0,1F0,1I0,0I0,0W0,1W0")
    assert str(add_update(v_shape)) == "0F0,1F0,1I0,0I0,0W0,0UPDATE0,1W0,1UPDATE0\n"


def test_the_last_gradient_is_sent_before_the_update():
    last = str(add_communication(add_update(build()))).splitlines()[1]
    assert last.endswith("1B1,1SEND_B1,1UPDATE1")


def test_forward_only_runs_on_its_own():
    forward = add_communication(forward_only(build("gpipe")))
    assert str(forward) == "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n"


def test_compute_only_undoes_the_others():
    assert compute_only(add_communication(add_update(build()))) == build()
