"""Who has taken a minibatch up, who is through with it, and who never will be."""

from __future__ import annotations

import threading
import time

from penstock.core.schedule import Schedule
from penstock.core.schedule.rounds import Segment
from penstock.engine.device.queue import NOTHING_ASKED
from penstock.engine.run.drive.ticket import ThreadTicket
from penstock.engine.run.minibatch import Minibatch, StepResult, StreamPosition

FAILURE = ValueError("seat 1")


def ticket_of(num_seats):
    segment = Segment.whole(Schedule(((),) * num_seats))
    return ThreadTicket(segment, Minibatch(0, ()), StreamPosition(), num_seats, NOTHING_ASKED)


def soon(seconds=60.0):
    return time.monotonic() + seconds


def test_whoever_waits_goes_on_when_the_last_rank_is_through():
    ticket, waited = ticket_of(2), []
    thread = threading.Thread(target=lambda: waited.append(ticket.all_went_well()))
    thread.start()
    for seat in (1, 0):
        assert ticket.begin(seat)
        assert not ticket.is_done
        ticket.succeed(seat, StepResult(number=seat))
    thread.join(60)
    assert waited == [True]
    assert ticket.is_done
    assert [result.number for result in ticket.results] == [0, 1]


def test_a_failure_is_told_before_the_others_are_through():
    ticket = ticket_of(3)
    for seat in range(3):
        assert ticket.begin(seat)
    ticket.fail(1, FAILURE)
    assert not ticket.all_went_well()
    assert ticket.errors == [None, FAILURE, None]
    assert ticket.still_running(soon(0.01)) == [0, 2]
    ticket.succeed(0, StepResult())
    ticket.succeed(2, StepResult())
    assert ticket.still_running(soon()) == []
    assert not ticket.is_done


def test_who_has_not_begun_when_it_is_withdrawn_never_does_and_is_not_waited_for():
    ticket = ticket_of(3)
    assert ticket.begin(1)
    ticket.withdraw()
    assert [ticket.begin(seat) for seat in range(3)] == [False] * 3
    assert ticket.still_running(soon(0.01)) == [1]
    ticket.fail(1, FAILURE)
    assert ticket.still_running(soon()) == []
