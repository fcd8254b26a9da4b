"""Results come in the order of their frames, and what is told between them is not lost."""

from __future__ import annotations

import queue
import threading
import weakref

import pytest
import torch

from penstock.base.errors import InputError, RunError
from penstock.training.live.intake import LiveFrame, News, Result
from penstock.training.live.loop import FrameOutput, Loop, Results
from penstock.training.live.report import StreamLedger

FAILED = RunError("rank 2 failed")


class FakeLoop:
    """Has arrivals, and may have failed."""

    name = "rank 1"

    def __init__(self, *told):
        self.arrivals = queue.SimpleQueue()
        self.failure = None
        for item in told:
            self.arrivals.put(arrival(item) if isinstance(item, int) else item)

    def taken(self):
        pass

    def raise_failure(self):
        if self.failure is not None:
            raise self.failure


def arrival(number):
    return FrameOutput(Result(number, torch.ones(1), None, 0.0), 0.0, None)


def results_of(*told):
    loop = FakeLoop(*told)
    return Results(loop, StreamLedger(0)), loop


def numbers(results):
    return [result.frame for result in results]


def test_whoever_waits_after_rank_0_has_left_hears_of_it_every_time():
    results, _ = results_of(0, News.PAUSED, News.ENDED)
    assert results.next().frame == 0
    for _ in range(2):
        with pytest.raises(RunError, match=r"rank 1 waits .* but rank 0 has left the stream"):
            results.next()
    assert numbers(results.followed()) == []
    assert numbers(results.followed()) == []
    assert results.at_once() is None
    with pytest.raises(RunError, match="equally often"):
        results.next()
    assert results.num_taken == 1


def test_taking_what_is_there_leaves_the_pause_to_who_takes_the_rest():
    results, loop = results_of(0, News.PAUSED)
    assert [results.at_once().frame, results.at_once(), results.at_once()] == [0, None, None]
    assert numbers(results.followed()) == []
    for item in (News.PAUSED, arrival(1), News.PAUSED):
        loop.arrivals.put(item)
    assert results.at_once().frame == 1  # the pause before it is over
    assert numbers(results.followed()) == []


def test_a_failure_comes_behind_the_results_before_it():
    results, loop = results_of(0, News.CHANGED, 1)
    loop.failure = FAILED
    assert results.next().frame == 0
    with pytest.raises(RunError, match="rank 2 failed"):
        results.next()
    assert results.at_once().frame == 1
    for ask in (results.at_once, lambda: list(results.followed())):
        loop.arrivals.put(News.CHANGED)
        with pytest.raises(RunError, match="rank 2 failed"):
            ask()


def test_a_failure_that_was_told_is_told_to_who_asks_again():
    results, loop = results_of(News.CHANGED)
    loop.failure = FAILED
    for ask in (results.next, lambda: list(results.followed()), results.next):
        with pytest.raises(RunError, match="rank 2 failed"):
            ask()


def test_closing_ends_who_waits():
    results, loop = results_of()
    taken = []
    thread = threading.Thread(target=lambda: taken.extend(results.until(lambda: False)))
    thread.start()
    results.close()
    thread.join(60)
    assert not thread.is_alive() and not taken
    with pytest.raises(InputError, match="closed"):
        results.at_once()
    loop.arrivals.put(News.CHANGED)
    with pytest.raises(InputError, match="closed"):
        results.next()


def test_a_result_that_waits_does_not_keep_its_frame():
    # Between processes a target lies in memory that rank 0 has lent: results that a slow caller has
    # not taken would use up memory and open files of both.
    results, loop = results_of()
    target = torch.ones(1)
    frame = LiveFrame(0, torch.ones(1), target, True, 0.0)
    kept = [weakref.ref(frame.value), weakref.ref(target)]
    Loop._heard(loop, frame, torch.ones(1), None, None)
    del frame, target
    assert [tensor() for tensor in kept] == [None, None]
    assert results.next().frame == 0
