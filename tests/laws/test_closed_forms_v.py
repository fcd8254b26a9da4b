"""The schedules on a V (arXiv 2401.10241, 2405.15362, 2412.19437) against their formulas."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Costs, schedules, simulate
from penstock.base.errors import InputError
from penstock.core.schedule.check import check
from penstock.core.schedule.durations import snake
from penstock.core.schedule.lower import add_communication, add_update
from tests.kit.examples import more

any_m = pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min"])
on_a_v = pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min", "dualpipe-v"])
LEAST = {
    "zb-v": lambda p: 1,
    "v-half": lambda p: 1,
    "v-min": lambda p: 1,
    "dualpipe-v": lambda p: 2 * p,
}
PEAK = {
    "zb-v": lambda p: p,
    "v-half": lambda p: (p + 2) // 2,
    "v-min": lambda p: (p + 4) // 3,
    "dualpipe-v": lambda p: p + 0.5,
}
ranks = st.integers(1, 8)


@st.composite
def sizes(draw, least=lambda p: 1):
    p = draw(ranks)
    return p, draw(st.integers(least(p), 32))


def build(name, p, m):
    return schedules.build(name, num_ranks=p, num_microbatches=m)


def idle(name, p, m):
    """How many ops longer than a rank's work the step takes, each op of one stage lasting 1."""
    return simulate(build(name, p, m)).makespan - 6 * m


@on_a_v
@given(data=st.data())
def test_every_op_once_on_its_rank_of_the_v(name, data):
    p, m = data.draw(sizes(LEAST[name]))
    schedule = build(name, p, m)
    check(schedule)
    assert (schedule.num_stages, schedule.num_microbatches) == (2 * p, m)
    assert all(snake(p, 2)[op.stage] == rank for op, rank in schedule.where.items())
    done = Counter(op.kind for ops in schedule.ranks for op in ops)
    assert done["F"] == done["I"] + done["B"] == done["W"] + done["B"] == 2 * p * m


@on_a_v
@given(data=st.data())
def test_runs_with_room_for_one_message(name, data):
    p, m = data.draw(sizes(LEAST[name]))
    check(add_communication(add_update(build(name, p, m))), capacity=1)


@pytest.mark.parametrize("p", [9, 10, 16, *map(more, range(11, 16))])
@on_a_v
def test_many_ranks_run_with_room_for_one_message(name, p):
    for m in (1, 2, p, 2 * p, 40):
        if m >= LEAST[name](p):
            check(add_communication(add_update(build(name, p, m))), capacity=1)


@on_a_v
@given(data=st.data())
def test_microbatches_stay_in_order(name, data):
    # Also the weight gradients: they accumulate in the order of one device.
    p, m = data.draw(sizes(LEAST[name]))
    for ops in build(name, p, m).ranks:
        for line in {(op.stage, op.kind) for op in ops}:
            order = [op.microbatch for op in ops if (op.stage, op.kind) == line]
            assert order == sorted(order)


@on_a_v
@given(data=st.data(), costs=st.builds(Costs, *[st.floats(0.1, 10)] * 3))
def test_peak_is_the_same_on_every_rank_and_never_above(name, data, costs):
    p, m = data.draw(sizes(LEAST[name]))
    peaks = simulate(build(name, p, m), costs).peak_activations
    assert max(peaks) <= min(m, PEAK[name](p))
    if m >= 2 * p:
        assert set(peaks) == {PEAK[name](p)}


@given(sizes(lambda p: 2 * p - 1))
def test_zb_v_bubbles(size):
    p, m = size
    timeline = simulate(build("zb-v", p, m))
    assert timeline.bubble == pytest.approx((p - 1) / (6 * m + p - 1))
    assert timeline.stage_bubble == pytest.approx(0)


@given(p=ranks, data=st.data())
def test_zb_v_with_few_microbatches(p, data):
    m = data.draw(st.integers(1, 2 * p - 1))
    least = max(p - 1, 4 * p - 2 - 2 * m)
    assert least <= idle("zb-v", p, m) <= least + 1


@given(sizes(lambda p: p))
def test_v_half_idles_as_long_however_many_microbatches(size):
    p, m = size
    expected = p - 1 if p < 3 else 3 * p - (4 if p % 2 else 7)
    assert idle("v-half", p, m) == expected
    # The paper's approximation is p/(2m) of the work, 6m.
    assert expected <= 3 * p <= expected + 7


@given(sizes(lambda p: p + 1))
def test_v_min_idles_as_long_however_many_microbatches(size):
    p, m = size
    expected = p - 1 if p < 3 else 4 * p - (5 if p % 3 else 7)
    assert idle("v-min", p, m) == expected
    # The paper's approximation is 2p/(3m) of the work, 6m.
    assert expected <= 4 * p <= expected + 7


@any_m
@given(p=ranks, m=st.integers(1, 8))
def test_few_microbatches_take_no_longer_than_one_by_one(name, p, m):
    # One by one: the way there and back, F and I, and a W at the end.
    assert simulate(build(name, p, m)).makespan <= m * (4 * p + 2)


@given(sizes(lambda p: 2 * p))
def test_dualpipe_v_idles_half_as_long_as_with_joined_pairs(size):
    p, m = size
    assert simulate(build("dualpipe-v", p, m)).bubble == pytest.approx((p - 1) / (6 * m + p - 1))


@given(p=ranks, data=st.data())
def test_dualpipe_v_asks_for_one_microbatch_per_stage(p, data):
    m = data.draw(st.integers(1, 2 * p - 1))
    with pytest.raises(InputError, match=rf"is {m}, but {p} rank.* ≥ {2 * p}"):
        build("dualpipe-v", p, m)
