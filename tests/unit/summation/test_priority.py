"""What is needed first leaves first, of frames that are ready."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.summation.frames import FrameHead, FrameKind
from penstock.core.summation.priority import FrameQueue
from penstock.core.summation.server import _Session
from tests.unit.summation.test_exchange import SECONDS, check, folded, given_by, numbers_of
from tests.unit.summation.test_exchange import ring as fixture_ring

ring = fixture_ring
NUMBERS = np.zeros(1, np.float32)


def part(number, start, kind=FrameKind.PUSH):
    return FrameHead(kind, round=number, start=start, length=1), NUMBERS


GONE, LEFT = ((FrameHead(kind, start=1), None) for kind in (FrameKind.GONE, FrameKind.ABORT))


@given(st.permutations([GONE, part(1, 5), part(1, 3), part(2, 9), part(2, 0), LEFT, None]))
def test_news_come_before_numbers_and_what_lies_last_before_the_rest(frames):
    waiting = FrameQueue()
    for frame in frames:
        waiting.put(frame)
    expected = [GONE, part(1, 5), part(1, 3), part(2, 9), part(2, 0), LEFT, None]
    assert [waiting.get() for _ in frames] == expected


def test_frames_of_equal_need_stay_in_their_order():
    waiting = FrameQueue()
    paces = [(FrameHead(FrameKind.PACE, start=rate), None) for rate in (5, 1, 9)]
    for frame in paces:
        waiting.put(frame)
    assert [waiting.get() for _ in paces] == paces


def test_a_worker_sends_what_is_needed_first_before_the_rest(ring, monkeypatch):
    come = []
    contribute = _Session.contribute

    def noted(self, place, head, numbers, *, own):
        if own:  # over a connection
            come.append((place, self, head.start))
        contribute(self, place, head, numbers, own=own)

    monkeypatch.setattr(_Session, "contribute", noted)
    made = ring(2, 1, part_bytes=512)
    tensors, numbers = given_by(2, (20_000, 0, 0, 0), 3)
    check(tensors, made.sum(0, numbers))
    for place in range(2):
        for session in {session for _, session, _ in come}:
            starts = [start for who, where, start in come if (who, where) == (place, session)]
            assert starts == sorted(starts, reverse=True)


def test_sums_can_be_had_before_the_rest_is_handed_in(ring):
    made = ring(2, 1, part_bytes=512)
    tensors, numbers = given_by(2, (20_000, 0, 0, 0), 3)
    sums = [{0: np.empty_like(own[0])} for own in numbers]
    for place, worker in enumerate(made.workers):
        worker.begin(1, numbers[place], sums[place], filled=False)
        worker.fill(0, 10_000, 20_000)
    for own, worker in zip(sums, made.workers, strict=True):
        worker.wait(SECONDS, "a rank", {0: (15_000, 20_000)})
        assert np.array_equal(own[0][15_000:], numbers_of(folded(tensors, 0))[15_000:])
        assert worker._current.left
    for worker in made.workers:
        worker.fill(0, 0, 10_000)
    for worker in made.workers:
        worker.wait(SECONDS, "a rank")
    check(tensors, sums)
