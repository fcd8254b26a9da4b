"""The simulator against the formulas of the papers, for the families whose stages go round the
ranks in one direction, and for Chimera.

T is what one microbatch costs one *stage*; a rank with v stages works m·v·T.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock import Costs, Kind, check, schedules, simulate
from penstock.base.errors import InputError
from penstock.core.schedule.lower import add_communication, add_update
from tests.kit.examples import examples
from tests.kit.helpers import amounts

ranks = st.integers(1, 8)
microbatches = st.integers(1, 32)
several = st.integers(1, 4)
seconds = st.floats(0.01, 10)
share = amounts(1)
all_costs = st.tuples(seconds, seconds, seconds)
# W ≤ F: what is put off fits where a forward would have been. Beyond that, others wait for it.
short_weights = st.tuples(seconds, seconds, share).map(lambda fis: (*fis[:2], fis[0] * fis[2]))


def build(name, p, m, **options):
    return schedules.build(name, num_ranks=p, num_microbatches=m, **options)


def longest_stay(timeline):
    """The most time any rank spends from its first op to its last."""
    return max(own[-1].end - own[0].start for own in timeline.by_rank)


def close(expected):
    return pytest.approx(expected, rel=1e-9)


# --- eager 1F1B ---------------------------------------------------------------------------------


@given(p=ranks, m=microbatches, costs=all_costs, c=share)
def test_eager_1f1b_hides_hops_of_half_a_beat(p, m, costs, c):
    beat = sum(costs)
    hop = c * beat / 2
    timeline = simulate(build("eager-1f1b", p, m), Costs(*costs, hop=hop))
    assert timeline.makespan == close((m + p - 1) * beat + 2 * (p - 1) * hop)


@given(p=ranks, m=microbatches, costs=all_costs, c=share)
def test_eager_1f1b_holds_two_microbatches_per_stage_that_follows(p, m, costs, c):
    timeline = simulate(build("eager-1f1b", p, m), Costs(*costs, hop=c))
    assert timeline.peak_activations == tuple(min(2 * (p - s) - 1, m) for s in range(p))


# --- several stages per rank --------------------------------------------------------------------


@given(p=ranks, rounds=several, v=several, costs=all_costs)
def test_interleaving_divides_the_bubble(p, rounds, v, costs):
    m = p * rounds
    timeline = simulate(build("interleaved-1f1b", p, m, stages_per_rank=v), Costs(*costs))
    assert timeline.makespan == close((v * m + p - 1) * sum(costs))
    assert timeline.busy == close([v * m * sum(costs)] * p)
    assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1))


@given(p=ranks, m=microbatches, v=st.integers(2, 4), costs=all_costs)
def test_what_interleaving_holds(p, m, v, costs):
    timeline = simulate(build("interleaved-1f1b", p, m, stages_per_rank=v), Costs(*costs))
    expected = [((v - 1) * p + 2 * (p - 1 - s) + 1) / v for s in range(p)]
    if m >= 2 * p - 1:
        assert timeline.peak_activations == close(expected)
    for held, most in zip(timeline.peak_activations, expected, strict=True):
        assert held <= min(most, m) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "plain"),
    [("interleaved-1f1b", "1f1b"), ("breadth-first", "gpipe"), ("interleaved-zb", "zb-h1")],
)
@given(p=ranks, m=microbatches)
def test_one_stage_per_rank_is_the_plain_schedule(name, plain, p, m):
    assert build(name, p, m, stages_per_rank=1) == build(plain, p, m)


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@examples(8)
@given(p=ranks, m=microbatches)
def test_interleaving_never_deadlocks(v, p, m):
    schedule = build("interleaved-1f1b", p, m, stages_per_rank=v)
    check(schedule)
    check(add_communication(add_update(schedule)), capacity=1)


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@examples(8)
@given(p=ranks, m=microbatches)
def test_interleaved_zero_bubble_needs_channels_for_half_the_ranks(v, p, m):
    schedule = build("interleaved-zb", p, m, stages_per_rank=v)
    check(schedule)
    check(add_communication(add_update(schedule)), capacity=(p + 1) // 2)


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@examples(8)
@given(p=ranks, m=microbatches)
def test_breadth_first_needs_channels_for_m_over_p(v, p, m):
    schedule = build("breadth-first", p, m, stages_per_rank=v)
    check(schedule)
    check(add_communication(add_update(schedule)), capacity=max(1, m // p))


@given(p=ranks, more=st.integers(0, 24), v=several, costs=all_costs)
def test_breadth_first_divides_the_bubble(p, more, v, costs):
    m = p + more
    timeline = simulate(build("breadth-first", p, m, stages_per_rank=v), Costs(*costs))
    assert timeline.makespan == close((v * m + p - 1) * sum(costs))
    assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1))


@given(p=ranks, m=microbatches, v=several, costs=all_costs)
def test_breadth_first_holds_all_microbatches(p, m, v, costs):
    timeline = simulate(build("breadth-first", p, m, stages_per_rank=v), Costs(*costs))
    assert timeline.peak_activations == (m,) * p


@given(p=ranks, rounds=several, v=several, costs=short_weights)
def test_interleaved_zero_bubble_divides_the_bubble(p, rounds, v, costs):
    m, (f, i, w) = p * rounds, costs
    timeline = simulate(build("interleaved-zb", p, m, stages_per_rank=v), Costs(*costs))
    assert timeline.makespan == close(v * m * (f + i + w) + (p - 1) * max(f, f + i - w))


@given(p=ranks, m=microbatches, v=several, costs=all_costs)
def test_interleaved_zero_bubble_holds_at_most_p_microbatches(p, m, v, costs):
    timeline = simulate(build("interleaved-zb", p, m, stages_per_rank=v), Costs(*costs))
    if m >= p:
        assert timeline.peak_activations == close([p] * p)
    assert max(timeline.peak_activations) <= min(p, m) * (1 + 1e-9)


@given(p=ranks, m=microbatches, v=several)
def test_interleaved_zero_bubble_warms_up_with_a_round_per_lap(p, m, v):
    # Also where m < p makes for a smaller round; longer warm-ups would put the first backward off.
    for rank, ops in enumerate(build("interleaved-zb", p, m, stages_per_rank=v).ranks):
        before = [op.kind for op in ops].index(Kind.BACKWARD_INPUT)
        assert before == min((v - 1) * min(p, m) + p - rank, v * m)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "breadth-first", "interleaved-zb"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", None, True])
def test_no_stages_per_rank_is_refused(name, value):
    with pytest.raises(InputError, match=rf"{name}: stages_per_rank is .* must be .*≥ 1"):
        build(name, 2, 4, stages_per_rank=value)


# --- zero bubble, handcrafted -------------------------------------------------------------------


@given(p=ranks, more=st.integers(0, 24))
def test_zb_h1_takes_3m_plus_p_minus_1(p, more):
    m = p + more
    assert simulate(build("zb-h1", p, m)).makespan == 3 * m + p - 1


@given(p=ranks, more=st.integers(0, 24), costs=short_weights)
def test_zb_h1_waits_for_f_plus_i_minus_w(p, more, costs):
    m, (f, i, w) = p + more, costs
    timeline = simulate(build("zb-h1", p, m), Costs(*costs))
    assert longest_stay(timeline) == close(m * (f + i + w) + (p - 1) * (f + i - w))
    assert timeline.makespan == close(m * (f + i + w) + (p - 1) * max(f, f + i - w))


@given(p=ranks, more=st.integers(0, 17), costs=short_weights)
def test_zb_h2_waits_for_f_plus_i_minus_2w(p, more, costs):
    m, (f, i, w) = 2 * p - 1 + more, costs
    timeline = simulate(build("zb-h2", p, m), Costs(*costs))
    assert longest_stay(timeline) == close(m * (f + i + w) + (p - 1) * max(0, f + i - 2 * w))
    assert timeline.makespan == close(m * (f + i + w) + (p - 1) * max(f, f + i - 2 * w))


@given(p=ranks, more=st.integers(0, 17), costs=short_weights, c=share)
def test_what_hops_cost_zero_bubble(p, more, costs, c):
    # Fits the ZB-H1 and ZB-H2 columns of Tables 5 and 6 of arXiv 2401.10241: a gradient is back
    # before its W is over as long as 2c ≤ W.
    m, (f, i, w) = 2 * p - 1 + more, costs
    hop = c * w / 2
    h1 = simulate(build("zb-h1", p, m), Costs(*costs, hop=hop))
    h2 = simulate(build("zb-h2", p, m), Costs(*costs, hop=hop))
    work = m * (f + i + w)
    assert longest_stay(h1) == close(work + (p - 1) * (f + i - w + 4 * hop))
    assert longest_stay(h2) == close(work + (p - 1) * max(0, f + i - 2 * w + 2 * hop))


@given(p=ranks, m=microbatches, costs=all_costs)
def test_what_zero_bubble_holds(p, m, costs):
    h1 = simulate(build("zb-h1", p, m), Costs(*costs))
    h2 = simulate(build("zb-h2", p, m), Costs(*costs))
    assert h1.peak_activations == (min(p, m),) * p
    assert h2.peak_activations == (min(2 * p - 1, m),) * p


@given(p=ranks, m=microbatches)
def test_zero_bubble_puts_weight_gradients_off_by_the_rank(p, m):
    # Also with fewer microbatches than ranks, where nothing is left to fill.
    for name, delay in (("zb-h1", 1), ("zb-h2", 2)):
        for rank, ops in enumerate(build(name, p, m).ranks):
            pending = accumulate(
                {Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: -1}.get(op.kind, 0) for op in ops
            )
            assert max(pending) == min(delay * rank + 1, m)


# --- Chimera ------------------------------------------------------------------------------------

even_ranks = st.integers(1, 4).map(lambda half: 2 * half)


def most_in_flight(timeline):
    """Per rank, activations of one stage."""
    change = {Kind.FORWARD: 1, Kind.BACKWARD: -1}
    return [max(accumulate(change[span.op.kind] for span in own)) for own in timeline.by_rank]


@given(p=even_ranks, groups=several, f=seconds, share_of_input=share)
def test_chimera_halves_the_bubble_where_forward_and_backward_take_as_long(
    p, groups, f, share_of_input
):
    m = p * groups
    costs = Costs(f, f * share_of_input, f * (1 - share_of_input))
    timeline = simulate(build("chimera", p, m), costs)
    assert timeline.bubble == pytest.approx((p - 2) / (2 * m + p - 2))


@given(p=even_ranks, groups=several, costs=all_costs)
def test_chimera_with_any_costs(p, groups, costs):
    # For one group and B = 2F this is the paper's (D − 2) / (3N/2 + D − 2).
    m, f, b = p * groups, costs[0], costs[1] + costs[2]
    timeline = simulate(build("chimera", p, m), Costs(*costs))
    waits = (p - 2) * (max(f, b) + (groups - 1) * abs(f - b))
    assert timeline.makespan == close(m * (f + b) + waits)
    assert timeline.busy == close([m * (f + b)] * p)


@given(p=even_ranks, groups=several, costs=all_costs)
def test_chimera_holds_more_in_the_middle(p, groups, costs):
    timeline = simulate(build("chimera", p, p * groups), Costs(*costs))
    expected = [p // 2 + 1 + min(rank, p - 1 - rank) for rank in range(p)]
    assert most_in_flight(timeline) == expected


@given(p=even_ranks, m=microbatches)
def test_chimera_runs_each_direction_on_its_own_ranks(p, m):
    where = build("chimera", p, m).where
    ways = [tuple(where[s, Kind.FORWARD, k, 0] for s in range(p)) for k in range(m)]
    down = tuple(range(p))
    assert set(ways) <= {down, down[::-1]}
    assert 0 <= ways.count(down) - ways.count(down[::-1]) <= 1


@given(p=even_ranks, m=microbatches)
def test_chimera_never_deadlocks(p, m):
    check(add_communication(add_update(build("chimera", p, m))), capacity=1)


@given(p=ranks, m=microbatches)
def test_chimera_says_that_it_needs_an_even_number_of_ranks(p, m):
    assume(p % 2)
    with pytest.raises(InputError, match=rf"even number of ranks, but num_ranks is {p};"):
        build("chimera", p, m)
