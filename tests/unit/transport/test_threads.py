"""Messages between threads: any order, deadlines, and news of failures."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from penstock.base.errors import DeadlineError, PeerError, RunError
from penstock.engine.transport import Edge, ThreadExchange
from penstock.engine.transport import threads as transport_of_threads

FORWARD, BACKWARD = Edge(0, 1, 0), Edge(0, 1, 1)


@pytest.fixture
def exchange():
    return ThreadExchange(3, deadline_seconds=0.1)


def test_a_value_is_handed_over_without_a_copy(exchange):
    sender, receiver, _ = exchange.transports
    value = {"hidden": torch.ones(2), "nothing": None}
    sender.send(FORWARD, 0, value)
    assert receiver.recv(FORWARD, 0, "rank 1") is value


def test_messages_may_be_awaited_in_any_order(exchange):
    sender, receiver, third = exchange.transports
    for microbatch in range(3):
        sender.send(FORWARD, microbatch, ("forward", microbatch))
        sender.send(BACKWARD, microbatch, ("backward", microbatch))
        third.send(Edge(2, 1, 0), microbatch, ("third", microbatch))
    wanted = [(BACKWARD, 2), (FORWARD, 1), (Edge(2, 1, 0), 0), (FORWARD, 0), (BACKWARD, 0)]
    found = [receiver.recv(edge, microbatch, "rank 1") for edge, microbatch in wanted]
    assert found == [
        *[("backward", 2), ("forward", 1), ("third", 0), ("forward", 0), ("backward", 0)],
    ]
    assert receiver.recv(FORWARD, 2, "rank 1") == ("forward", 2)


def test_none_is_a_value_like_any_other(exchange):
    sender, receiver, _ = exchange.transports
    sender.send(FORWARD, 1, "early")
    sender.send(FORWARD, 0, None)
    assert receiver.recv(FORWARD, 0, "rank 1") is None
    sender.send(BACKWARD, 0, "other")
    sender.send(BACKWARD, 1, None)
    assert receiver.recv(BACKWARD, 1, "rank 1") is None
    assert receiver.recv(FORWARD, 1, "rank 1") == "early"


def test_a_message_can_be_taken_once(exchange):
    sender, receiver, _ = exchange.transports
    sender.send(FORWARD, 0, "once")
    receiver.recv(FORWARD, 0, "rank 1")
    with pytest.raises(DeadlineError):
        receiver.recv(FORWARD, 0, "rank 1")


def test_a_missed_deadline_names_who_waited_for_whom_and_what_to_do(exchange):
    exchange.transports[0].send(FORWARD, 5, "not this one")
    start = time.monotonic()
    with pytest.raises(
        DeadlineError,
        match=r"rank 1, waiting at 1RECV_F0: rank 0 did not answer within 0\.1 s; .*raise",
    ):
        exchange.transports[1].recv(FORWARD, 0, "rank 1, waiting at 1RECV_F0")
    assert 0.09 < time.monotonic() - start < 200
    # What came early is still there.
    assert exchange.transports[1].recv(FORWARD, 5, "rank 1") == "not this one"


def test_other_messages_do_not_prolong_the_deadline(exchange):
    stop = threading.Event()

    def chatter():
        for microbatch in range(1, 100_000):
            exchange.transports[0].send(FORWARD, microbatch, None)
            if stop.wait(0.01):
                return

    thread = threading.Thread(target=chatter)
    thread.start()
    start = time.monotonic()
    with pytest.raises(DeadlineError):
        exchange.transports[1].recv(FORWARD, 0, "rank 1")
    assert time.monotonic() - start < 200  # the chatter goes on for longer
    stop.set()
    thread.join()


def test_a_receiver_that_waits_has_the_message_before_its_sender_goes_on(monkeypatch):
    monkeypatch.setattr(transport_of_threads, "_LETTING_GO_SECONDS", 60.0)
    exchange, received = ThreadExchange(2, deadline_seconds=300), []
    sender, receiver = exchange.transports
    for number in range(20):
        thread = threading.Thread(
            target=lambda own=number: received.append(receiver.recv(FORWARD, own, "rank 1"))
        )
        thread.start()
        while not receiver.waits:
            time.sleep(0.001)
        sender.send(FORWARD, number, number)
        assert exchange.inboxes[1].empty()
        thread.join(60)
    assert received == [*range(20)]


def test_a_receiver_that_does_something_else_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(transport_of_threads, "_LETTING_GO_SECONDS", 60.0)
    exchange = ThreadExchange(2, deadline_seconds=300)
    thread = threading.Thread(target=lambda: exchange.transports[0].send(FORWARD, 0, None))
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_a_failure_wakes_all_who_wait_long_before_the_deadline():
    exchange = ThreadExchange(3, deadline_seconds=300)
    caught = []

    def wait(rank):
        try:
            exchange.transports[rank].recv(Edge(0, rank, 0), 0, f"rank {rank}, waiting")
        except PeerError as error:
            caught.append(error)

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    exchange.transports[0].fail("rank 0 failed: boom", ())
    for thread in threads:
        thread.join(timeout=10)
    assert sorted(map(str, caught)) == [
        f"rank {rank}, waiting: cancelled because rank 0 failed: boom" for rank in (1, 2)
    ]
    assert {error.reason for error in caught} == {"rank 0 failed: boom"}


def test_what_arrived_before_a_failure_can_still_be_taken(exchange):
    sender, receiver, _ = exchange.transports
    sender.send(FORWARD, 1, "early")
    sender.send(FORWARD, 0, "first")
    sender.fail("boom", ())
    assert receiver.recv(FORWARD, 0, "rank 1") == "first"
    assert receiver.recv(FORWARD, 1, "rank 1") == "early"
    with pytest.raises(PeerError):
        receiver.recv(FORWARD, 2, "rank 1")


def test_reset_forgets_messages_and_failures(exchange):
    sender, receiver, _ = exchange.transports
    sender.send(FORWARD, 1, "stale")
    sender.send(FORWARD, 0, "taken")
    receiver.recv(FORWARD, 0, "rank 1")
    sender.send(BACKWARD, 0, "stale")
    sender.fail("boom", ())
    receiver.reset()
    sender.send(FORWARD, 1, "fresh")
    assert receiver.recv(FORWARD, 1, "rank 1") == "fresh"
    with pytest.raises(DeadlineError):
        receiver.recv(BACKWARD, 0, "rank 1")


def test_a_step_that_was_given_up_is_forgotten(exchange):
    sender, receiver, third = exchange.transports
    sender.send(FORWARD, 1, "early")
    sender.send(FORWARD, 0, "taken")
    receiver.recv(FORWARD, 0, "rank 1")
    sender.send(FORWARD, 2, "stale")
    third.fail("boom", ())
    receiver.discard(10)
    sender.discard(10)
    sender.send(FORWARD, 10, "fresh")
    assert receiver.recv(FORWARD, 10, "rank 1") == "fresh"
    for number in (1, 2):
        with pytest.raises(DeadlineError):
            receiver.recv(FORWARD, number, "rank 1")
    sender.fail("again", ())
    with pytest.raises(PeerError, match="again"):
        receiver.recv(FORWARD, 11, "rank 1")


def test_a_rank_that_closes_its_pipeline_is_missed_by_those_who_wait_for_it_alone():
    sender, receiver, third = ThreadExchange(3, deadline_seconds=300).transports
    sender.send(FORWARD, 1, "sent before")
    sender.close("training is over")
    sender.close("again")
    third.send(Edge(2, 1, 0), 0, "from another")
    assert receiver.recv(Edge(2, 1, 0), 0, "rank 1") == "from another"
    assert receiver.recv(FORWARD, 1, "rank 1") == "sent before"
    with pytest.raises(PeerError, match=r"rank 1: rank 0 closed its pipeline \(training is over\)"):
        receiver.recv(FORWARD, 2, "rank 1")
    with pytest.raises(RunError, match=r"rank 0 has closed its pipeline \(training is over\)"):
        sender.send(FORWARD, 2, None)
