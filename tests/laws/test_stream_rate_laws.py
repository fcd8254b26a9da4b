"""How fast frames go through pipelines that never flush, and how long each takes."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock import Costs, Timeline, schedules, simulate, versions
from penstock.base.errors import InputError
from penstock.core.schedule.lower import add_updates
from penstock.core.schedule.rounds import Rounds
from penstock.core.timing.spans import beat
from penstock.planning.plans.prediction import steady_seconds
from tests.kit.examples import examples

times = st.integers(1, 8).map(float)
POLICIES = {"pipedream": versions.Stash(), "partime": versions.Sideways()}


@st.composite
def stage_costs(draw, most_stages=5):
    """Stages that differ, with hops that differ."""
    p = draw(st.integers(1, most_stages))
    forward, backward, update, hop = (
        draw(st.lists(times | st.just(0.0), min_size=p, max_size=p)) for _ in range(4)
    )
    backward = [max(1.0, seconds) for seconds in backward]
    return p, Costs(forward, 0.0, backward, hop=hop, update=update)


def build(family, p):
    return lambda length: schedules.build(family, num_ranks=p, num_microbatches=length)


def steady(family, p, costs):
    return steady_seconds(build(family, p), POLICIES[family], costs, 1, (1,) * p)


def tick_of(costs, p):
    """What each stage has to do for a frame."""
    parts = zip(costs.forward, costs.backward_weight, costs.update, strict=True)
    return [sum(part) for part in parts][:p]


@pytest.mark.parametrize("family", POLICIES)
@given(stage_costs())
@examples(60)
@example((5, Costs([0.0] * 5, 0.0, [1.0] * 5, hop=[3.0, 2.0, 3.0, 2.0, 0.0], update=[0.0] * 5)))
def test_the_beat_is_that_of_the_slowest_loop(family, given_costs):
    """A loop goes from a stage forward to a later one and back. As many frames are in it as the
    first of them runs ahead of the other, and one: 2(e−s)+1 in PARTIME, e−s+1 in PipeDream."""
    p, costs = given_costs
    ticks, ahead = tick_of(costs, p), POLICIES[family].ahead
    loops = (
        # No loop waits for an update but for that of its first stage, which is at its turn's end.
        (sum(ticks[s : e + 1]) - sum(costs.update[s + 1 : e + 1]) + 2 * sum(costs.hop[s:e]))
        / (ahead * (e - s) + 1)
        for s in range(p)
        for e in range(s, p)
    )
    assert steady(family, p, costs) == pytest.approx(max(loops))


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0, 0.25, 0.5, 0.75, 2])
def test_hops_up_to_half_a_tick_are_free(p, share):
    tick, c = 3.0, 3.0 * share
    law = max(tick, (p * tick + 2 * (p - 1) * c) / (2 * p - 1))
    assert steady("partime", p, Costs(hop=c)) == pytest.approx(law, rel=1e-12)
    assert (law == tick) == (share <= 0.5 or p == 1)
    stashing = steady("pipedream", p, Costs(hop=c))
    assert stashing == pytest.approx(tick + 2 * (p - 1) * c / p, rel=1e-12)


@given(stage_costs(most_stages=4), st.integers(1, 30).map(lambda tenths: tenths / 10))
@example((4, Costs(forward=(0.0,) * 4, backward_input=0.0, hop=(0.0, 0.0, 2.0, 0.0))), 1.1)
@examples(20)
def test_latency_lies_between_a_frames_own_way_and_as_many_ticks_as_stages(given_costs, load):
    p, costs = given_costs
    tick = steady("partime", p, costs)
    stream = add_updates(build("partime", p)(40 * p), Rounds((1,) * p))
    timeline = simulate(stream, costs, arrivals=load / tick)
    # A stage that is hardly slower than those behind it shows late.
    assert timeline.rate == pytest.approx(min(load, 1.0) / tick, rel=0.05)
    way = sum(costs.forward) + sum(costs.hop[: p - 1])
    settled = timeline.transits[20 * p :]
    assert min(settled) >= way * (1 - 1e-9)
    # Where hops decide, frames enter in bursts: the first of a burst waits inside for the others.
    # The window may begin in the middle of one.
    most = max(way, p * tick)
    assert fmean(settled) <= most + p * tick / len(settled)
    # Without a queue, latency is what a frame is inside; with one, it grows.
    waited = [
        whole - inside for whole, inside in zip(timeline.latencies, timeline.transits, strict=True)
    ]
    assert min(waited) >= -1e-9
    if load > 1:
        assert waited[-1] > waited[20 * p] - 1e-9
        assert waited[-1] == pytest.approx(timeline.latencies[-1] - settled[-1])


def test_both_ends_of_that_law_are_met():
    build_stream = build("partime", 4)
    light, full = (simulate(build_stream(200), Costs(), arrivals=load / 3) for load in (0.3, 2))
    assert light.latencies[-1] == light.transits[-1] == pytest.approx(4)
    assert full.transits[-1] == pytest.approx(4 * 3)
    assert full.latencies[-1] > 4 * 3 * 10
    assert light.rate == pytest.approx(0.1) and full.rate == pytest.approx(1 / 3)


def test_any_schedule_can_wait_for_a_source():
    """Where a pipeline drains, nothing limits how many frames are inside."""
    schedule = schedules.build("1f1b", num_ranks=2, num_microbatches=6)
    timeline = simulate(schedule, Costs(), arrivals=0.1)
    assert timeline.arrivals == (0, 10, 20, 30, 40, 50)
    assert timeline.rate == pytest.approx(0.1)
    assert timeline.latencies[0] == 2
    assert simulate(schedule).arrivals == ()
    assert simulate(schedule).latencies == simulate(schedule).transits


def test_arrivals_are_kept_in_the_file():
    timeline = simulate(build("partime", 2)(8), Costs(), arrivals=0.2)
    again = Timeline.from_json(timeline.to_json())
    assert again.arrivals == timeline.arrivals and again.latencies == timeline.latencies
    moved = Timeline.of(
        [span._replace(start=span.start + 7, end=span.end + 7) for span in timeline.spans], 2,
        arrivals=[time + 7 for time in timeline.arrivals],
    )  # fmt: skip
    assert moved.latencies == pytest.approx(timeline.latencies)


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf"), "30", 5e-324])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(InputError, match="give how many frames arrive per second"):
        simulate(build("partime", 2)(8), Costs(), arrivals=rate)


@given(st.lists(times, min_size=1, max_size=6), st.integers(0, 5))
def test_a_beat_is_the_mean_of_its_rhythm(rhythm, noise):
    """Whatever comes first, and wherever the second half begins."""
    gaps = [9.0] * noise + rhythm * 12
    clock = [sum(gaps[:place]) for place in range(len(gaps) + 1)]
    assert beat(clock) == pytest.approx(sum(rhythm) / len(rhythm), rel=1e-12)


def test_a_beat_without_a_rhythm_is_the_mean_of_the_second_half():
    assert beat([]) == beat([3.0]) == 0.0
    assert beat([3.0, 5.0]) == 2.0
    assert beat([0.0, 1.0, 4.0, 9.0, 16.0, 25.0]) == 8.0
