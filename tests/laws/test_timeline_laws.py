"""A timeline survives its file."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock import Costs, Timeline, schedules, simulate
from penstock.core.schedule.lower import add_communication, add_update
from tests.kit.helpers import amounts

seconds = amounts(10)


@given(
    st.sampled_from(["gpipe", "1f1b"]),
    st.integers(1, 5),
    st.integers(1, 6),
    st.builds(Costs, seconds, seconds, seconds, seconds, seconds),
)
def test_json_round_trip_keeps_every_metric(name, p, m, costs):
    schedule = schedules.build(name, num_ranks=p, num_microbatches=m)
    timeline = simulate(add_communication(add_update(schedule)), costs)
    back = Timeline.from_json(timeline.to_json())
    assert back == timeline
    assert (back.makespan, back.bubble) == (timeline.makespan, timeline.bubble)
    assert back.peak_activations == timeline.peak_activations
    assert Timeline.of(reversed(timeline.spans), p).makespan == timeline.makespan
