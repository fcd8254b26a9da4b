"""The queue in front of the first stage: what waits, what is dropped, what is refused."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import InputError, RunError
from penstock.training.live.intake import Intake
from tests.kit.examples import examples

ACTIONS = st.lists(st.sampled_from(["take", "wait", "drop-oldest"]), max_size=30)


@given(actions=ACTIONS)
@examples(60)
def test_nothing_is_lost_but_what_is_counted_and_the_newest_never_is(actions):
    told = []
    intake = Intake(lambda: told.append(1))
    waiting, taken, number = [], [], 0
    for action in actions:
        if action == "take":
            item = intake.take()
            assert item == (waiting.pop(0) if waiting else None)
            taken += [] if item is None else [item]
            continue
        drops = action == "drop-oldest" and bool(waiting)
        assert intake.put(number, action) is not drops
        waiting = [*waiting[drops:], number]
        number += 1
        assert intake.longest >= len(waiting) == len(intake)
    assert intake.num_dropped + len(taken) + len(waiting) == number == len(told)
    assert taken == sorted(taken)


def test_a_late_frame_may_be_refused():
    intake = Intake(lambda: None)
    intake.put("first", "raise")
    with pytest.raises(RunError, match="drop-oldest"):
        intake.put("second", "raise")
    assert (intake.take(), intake.take(), intake.num_late) == ("first", None, 1)


def test_unknown_ways_are_told():
    with pytest.raises(InputError, match="when_late"):
        Intake(lambda: None).put("frame", "drop-newest")


def test_who_waits_for_room_goes_on_when_there_is_some():
    intake = Intake(lambda: None)
    intake.put("frame")
    assert not intake.await_room(0.01)
    threading.Timer(0.05, intake.take).start()
    assert intake.await_room(60)
