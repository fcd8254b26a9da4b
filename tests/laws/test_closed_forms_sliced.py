"""Seq1F1B and Hanayo against their papers (arXiv 2406.03488, 2308.15762)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Costs, Kind, check, schedules, simulate
from penstock.base.errors import InputError

seconds = st.floats(0.01, 10)
costs = st.builds(Costs, seconds, seconds, seconds)


def seq1f1b(p, m, k):
    return schedules.build("seq1f1b", num_ranks=p, num_microbatches=m, num_slices=k)


@given(p=st.integers(1, 8), m=st.integers(1, 16), k=st.integers(1, 5), costs=costs)
def test_slices_divide_the_idle_time_of_1f1b(p, m, k, costs):
    schedule = seq1f1b(p, m, k)
    check(schedule)
    timeline = simulate(schedule, costs)
    beat = costs.forward + costs.backward_input + costs.backward_weight
    assert timeline.makespan == pytest.approx(m * beat + (p - 1) * beat / k)
    assert timeline.bubble == pytest.approx((p - 1) / (k * m + p - 1))


@given(p=st.integers(1, 8), m=st.integers(1, 16), k=st.integers(1, 5))
def test_slices_divide_the_memory(p, m, k):
    held = simulate(seq1f1b(p, m, k)).peak_activations
    assert held == pytest.approx([min(p - 1 - s + k, m * k) / k for s in range(p)])


def test_slices_run_forward_in_order_and_backward_in_reverse():
    for ops in seq1f1b(3, 4, 3).ranks:
        for k in range(4):
            forward = [op.slice for op in ops if op.kind is Kind.FORWARD and op.microbatch == k]
            backward = [op.slice for op in ops if op.kind is Kind.BACKWARD and op.microbatch == k]
            assert (forward, backward) == ([0, 1, 2], [2, 1, 0])


def test_one_slice_is_1f1b():
    assert seq1f1b(4, 8, 1) == schedules.build("1f1b", num_ranks=4, num_microbatches=8)


def hanayo(p, m, waves):
    return schedules.build("hanayo", num_ranks=p, num_microbatches=m, num_waves=waves)


@given(p=st.integers(1, 8), waves=st.integers(1, 4))
def test_waves_come_close_to_the_published_bubble(p, waves):
    timeline = simulate(hanayo(p, p, waves))
    published = (2 * p - 2) / (3 * p * waves + p - 1)
    assert timeline.bubble <= published + 0.0025


@given(p=st.integers(1, 6), more=st.integers(0, 12), waves=st.integers(1, 3), costs=costs)
def test_waves_hold_no_more_than_1f1b(p, more, waves, costs):
    schedule = hanayo(p, p + more, waves)
    check(schedule)
    assert schedule.weight_copies == 1
    assert max(simulate(schedule, costs).peak_activations) <= p + 1e-9


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hanayo", {}, "num_microbatches is 3, but 4 ranks need ≥ 4"),
        ("hanayo", {"num_waves": 0}, "num_waves is 0, but must be ≥ 1"),
        ("seq1f1b", {"num_slices": 10**9}, "1000000000 parts are more than 100,000,000"),
        ("seq1f1b", {"num_slices": 1.5}, "num_slices is 1.5, but must be a whole number"),
    ],
)
def test_what_they_refuse(name, options, message):
    with pytest.raises(InputError, match=message):
        schedules.build(name, num_ranks=4, num_microbatches=3, **options)
