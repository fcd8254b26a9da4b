"""Laws of PARTIME, whose frames learn through the newest activations."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Kind, check, schedules
from penstock.schedule.lower import add_communication, add_updates
from penstock.schedule.rounds import Rounds
from penstock.schedule.segment import Windows


def partime(num_ranks, num_frames):
    return schedules.build("partime", num_ranks=num_ranks, num_microbatches=num_frames)


@given(st.integers(1, 6), st.integers(1, 30))
def test_a_backward_stands_behind_the_forward_that_it_goes_through(p, length):
    """Frame k − 2(p−1−s) goes back through the graph of frame k, which is the newest."""
    schedule = partime(p, length)
    check(schedule)
    for stage, ops in enumerate(schedule.ranks):
        newest = None
        for op in ops:
            if op.kind is Kind.FORWARD:
                newest = op.microbatch
            else:
                lag = 2 * (p - 1 - stage)
                assert newest == min(op.microbatch + lag, length - 1)


@given(st.integers(1, 5), st.lists(st.integers(1, 3), min_size=1, max_size=16), st.booleans())
@settings(max_examples=40)
def test_segments_end_to_end_are_the_schedule_of_the_stream(p, sizes, ends_with_the_last):
    ones = (1,) * p

    def lower(length, rounds):
        return add_communication(add_updates(partime(p, length), rounds))

    windows = Windows(lower, ones, by_minibatch=False, ahead=2)
    assert windows.num_in_flight == 2 * p - 1
    whole = lower(sum(sizes), Rounds(ones))
    starts = [0, *accumulate(sizes)]
    fed: list[list] = [[] for _ in whole.ranks]
    for index in range(len(sizes) + (not ends_with_the_last)):
        last = index == len(sizes) - ends_with_the_last
        segment, start = windows.segment(sizes[: index + 1], num_before=index, last=last)
        for own, ops in zip(fed, segment.ranks, strict=True):
            own += [op._replace(microbatch=op.microbatch + starts[start]) for op in ops]
    assert tuple(map(tuple, fed)) == whole.ranks


@pytest.mark.parametrize("p", [2, 4, 8])
def test_windows_need_not_know_more_than_is_in_flight(p):
    """A stream of any length costs the same few windows: each begins 2p−1 frames back."""
    windows = Windows(
        lambda length, rounds: add_updates(partime(p, length), rounds),
        (1,) * p, by_minibatch=False, ahead=2,
    )  # fmt: skip
    segment, start = windows.segment([1] * 100, num_before=99, last=False)
    assert start == 99 - (2 * p - 1)
    for stage, ops in enumerate(segment.ranks):
        kinds = [(op.kind, op.microbatch + start) for op in ops]
        old = 99 - 2 * (p - 1 - stage)
        assert kinds == [(Kind.FORWARD, 99), (Kind.BACKWARD, old), (Kind.UPDATE, old)]
