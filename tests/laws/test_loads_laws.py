"""``loads`` names every moment at which most may be held, whatever sizes there are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock import Sizes, schedules
from penstock.core.schedule.lower import add_recompute
from penstock.core.schedule.memory import Moments, loads, peaks
from penstock.core.versions import USUAL

SINGLE = [
    name
    for name in schedules.names()
    if name not in {"zb-auto", "optimal"}
    and (built := schedules.build(name, num_ranks=2, num_microbatches=4)).num_stages == 2
    and built.num_slices == 1
    and built.weight_copies == 1
]
numbers = st.integers(0, 9).map(float)


@st.composite
def orders(draw):
    """(a schedule, the stages that run forward a second time)."""
    ranks, count = draw(st.integers(2, 4)), draw(st.integers(1, 8))
    name = draw(st.sampled_from(SINGLE))
    schedule = schedules.build(name, num_ranks=ranks, num_microbatches=max(count, ranks))
    again = draw(st.sets(st.integers(0, ranks - 1))) if name not in USUAL else set()
    return schedule, again


def test_many_families_have_one_stage_per_rank():
    assert {"gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "pipedream"} <= {*SINGLE}


@given(orders(), st.data())
def test_the_worst_of_all_loads_is_the_peak(order, data):
    schedule, again = order
    activation, halves, inputs = (
        [data.draw(numbers) for _ in range(schedule.num_stages)] for _ in range(3)
    )
    sizes = Sizes(activation, halves, inputs)
    worst = tuple(
        max(
            load.inputs * inputs[rank]
            + load.whole * activation[rank]
            + load.for_weight * halves[rank]
            for load in loads(moments, again, schedule.activations)
        )
        for rank, moments in enumerate(Moments.of_ranks(schedule.rank_ops))
    )
    running = add_recompute(schedule, again) if again else schedule
    assert worst == peaks(running.ranks, sizes, activations=schedule.activations)


@given(orders())
def test_no_load_is_less_than_another(order):
    schedule, again = order
    for moments in Moments.of_ranks(schedule.rank_ops):
        found = loads(moments, again, schedule.activations)
        for one in found:
            for other in found:
                assert one == other or any(a > b for a, b in zip(one, other, strict=True))
