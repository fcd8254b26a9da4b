"""The simulator against the formulas of the papers (arXiv 1811.06965, 2006.09503, 2401.10241)."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock import Costs, schedules, simulate
from penstock.base.errors import InputError
from tests.kit.examples import examples
from tests.kit.helpers import amounts

ranks = st.integers(1, 8)
microbatches = st.integers(1, 32)
seconds = st.floats(0.01, 10)
costs = st.builds(Costs, seconds, seconds, seconds)
flushed = pytest.mark.parametrize("name", ["gpipe", "1f1b"])


def run(name, p, m, costs):
    return simulate(schedules.build(name, num_ranks=p, num_microbatches=m), costs)


def beat(costs):
    return costs.forward + costs.backward_input + costs.backward_weight


@flushed
@given(p=ranks, m=microbatches, costs=costs)
def test_every_rank_idles_for_p_minus_1_beats(name, p, m, costs):
    timeline = run(name, p, m, costs)
    assert timeline.makespan == pytest.approx((m + p - 1) * beat(costs))
    assert timeline.busy == pytest.approx([m * beat(costs)] * p)


@flushed
@given(p=ranks, m=microbatches, costs=costs)
def test_bubble_is_p_minus_1_over_m_plus_p_minus_1(name, p, m, costs):
    timeline = run(name, p, m, costs)
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.stage_bubble == pytest.approx((p - 1) / (m + p - 1))


@given(p=ranks, m=microbatches, costs=costs)
def test_gpipe_holds_all_microbatches(p, m, costs):
    assert run("gpipe", p, m, costs).peak_activations == (m,) * p


@given(p=ranks, m=microbatches, costs=costs)
def test_1f1b_holds_as_many_microbatches_as_stages_follow(p, m, costs):
    expected = tuple(min(p - s, m) for s in range(p))
    assert run("1f1b", p, m, costs).peak_activations == expected


@given(p=st.integers(2, 8), rounds=st.integers(1, 4), costs=costs, c=amounts(5))
def test_what_hops_cost_1f1b(p, rounds, costs, c):
    # Fits the 1F1B column of Tables 5 and 6 of arXiv 2401.10241; stated for p | m.
    m = p * rounds
    hopping = Costs(costs.forward, costs.backward_input, costs.backward_weight, hop=c)
    expected = (m + p - 1) * beat(costs) + (2 * (p - 1) * m / p + 2 * (p - 2)) * c
    assert run("1f1b", p, m, hopping).makespan == pytest.approx(expected)


@flushed
@given(p=ranks, m=microbatches, costs=costs, c=amounts(5))
def test_hops_delay_by_at_least_one_way_there_and_back(name, p, m, costs, c):
    hopping = Costs(costs.forward, costs.backward_input, costs.backward_weight, hop=c)
    least = (m + p - 1) * beat(costs) + 2 * (p - 1) * c
    assert run(name, p, m, hopping).makespan >= least * (1 - 1e-9)


@pytest.mark.parametrize("name", [name for name in schedules.names() if name != "optimal"])
@examples(20)
@given(p=ranks, m=microbatches, data=st.data())
def test_no_step_is_shorter_than_its_busiest_rank(name, p, m, data):
    try:
        schedule = schedules.build(name, num_ranks=p, num_microbatches=m)
    except InputError:
        assume(False)
    one_per_stage = st.lists(seconds, min_size=schedule.num_stages, max_size=schedule.num_stages)
    timeline = simulate(schedule, Costs(*(data.draw(one_per_stage) for _ in range(3))))
    assert timeline.makespan >= max(timeline.busy) * (1 - 1e-9)
    assert -1e-9 <= timeline.bubble < 1
