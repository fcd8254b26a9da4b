"""What holds for schedules without most of their middle: they are those of many microbatches but
for turns of the same, and steps of many come to what a simulation of every op says."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock import Costs, Schedule, schedules, simulate, versions
from penstock.core.schedule import families, repetition
from penstock.core.schedule.lower import add_recompute, add_update
from penstock.core.schedule.memory import Moments, Sizes, peaks
from penstock.core.schedule.op import Kind
from penstock.core.schedule.repetition import abridged, repetitions_of, shortened, with_turns
from penstock.core.timing.simulator.step import passed, step_in_rows, step_of
from tests.kit.examples import examples

FAMILIES = [name for name in families.names() if name not in families.HOLD_ALL | families.SEARCHED]
DRAIN = [name for name in FAMILIES if name not in versions.USUAL]
SIDE_BY_SIDE = [name for name in FAMILIES if name not in (*families.UNLIKE_REPLICAS, "partime")]


@pytest.fixture(autouse=True, scope="module")
def _few_are_many():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("MANY", 100), ("_FEWEST", 24), ("_TIMES_SHORTER", 1.5)):
            patch.setattr(repetition, name, value)
        yield


def build(name, num_ranks, options, num_microbatches):
    return schedules.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, **options)


@st.composite
def orders(draw, name):
    """How to build a family's schedule of any number of microbatches, and on how many ranks."""
    depth, width, options = draw(st.integers(1, 4)), 1, {}
    if name == "chimera":
        depth = 2 * ((depth + 1) // 2)
    if name in families.UNLIKE_REPLICAS:
        counts = draw(st.lists(st.integers(1, 3), min_size=depth, max_size=depth))
        return partial(build, name, sum(counts), {"replicas": counts}), sum(counts)
    if name in ("interleaved-1f1b", "interleaved-zb"):
        options["stages_per_rank"] = draw(st.integers(1, 3))
    if name in SIDE_BY_SIDE and draw(st.booleans()):
        width = 2
        options["replicas"] = (2,) * build(name, depth, options, 2 * depth).num_stages
    return partial(build, name, depth * width, options), depth * width


@st.composite
def shorter_and_whole(draw, names):
    """A schedule, and the same without most of its middle; some stages run forward twice."""
    name = draw(st.sampled_from(names))
    make, num_ranks = draw(orders(name))
    whole = make(draw(st.integers(100, 130)) + 48 * num_ranks)
    short = abridged(make, whole.num_microbatches, 2 * num_ranks)
    assert short is not None
    again = sorted(draw(st.sets(st.integers(0, whole.num_stages - 1))))
    if not again or name in versions.USUAL:
        return short, whole
    return add_recompute(short, again), add_recompute(whole, again)


@examples(30)
@given(shorter_and_whole(FAMILIES))
def test_a_long_schedule_is_a_short_one_with_more_turns(pair):
    short, whole = pair
    turns = repetitions_of(short.columns)
    more, rest = divmod(whole.num_microbatches - short.num_microbatches, turns[0].microbatches)
    assert not rest and more > 0
    assert with_turns(short, turns, more) == whole
    assert with_turns(whole, repetitions_of(whole.columns), -more) == short
    sizes = Sizes([1.0 + stage for stage in range(whole.num_stages)])
    held = (peaks(s.rank_ops, sizes, s.num_slices, s.activations) for s in (short, whole))
    assert next(held) == pytest.approx(next(held), rel=1e-12)
    if whole.num_slices == 1 and Kind.RECOMPUTE not in whole.kinds:
        own, others = (Moments.of_ranks(schedule.rank_ops) for schedule in pair)
        for few, many in zip(own, others, strict=True):
            for again in ((), whole.stages_of[0]):
                assert few.rows(again).tolist() == many.rows(again).tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_some_hundred_microbatches_are_enough_for_a_million(name):
    asked = []

    def counted(num_microbatches):
        asked.append(num_microbatches)
        return build(name, 4, {}, num_microbatches)

    short = abridged(counted, 1_000_003, 8)
    assert max(asked) <= 200
    turns = repetitions_of(short.columns)
    longer = with_turns(short, turns, 60)
    assert longer == build(name, 4, {}, short.num_microbatches + 60 * turns[0].microbatches)


@pytest.mark.parametrize("name", sorted(families.HOLD_ALL))
def test_where_turns_hold_more_and_more_nothing_is_left_out(name):
    assert abridged(partial(build, name, 3, {}), 1_000_000, 6) is None


def test_an_order_that_begins_with_its_last_microbatch_is_gone_through_whole():
    text = ["0F299", *(f"0F{k},0B{k}" for k in range(299)), "0B299"]
    odd = Schedule.parse(",".join(text))
    assert shortened(odd) == (odd, 0)
    usual = Schedule.parse(",".join([*text[1:-1], "0F299,0B299"]))
    assert shortened(usual)[1] > 0
    assert step_of(odd, Costs()).seconds == step_of(usual, Costs()).seconds == approximately(900)


seconds = st.sampled_from([1.0, 1.0, 0.99, 1.001, 1.0003, 2.0]) | st.floats(0.1, 3)
"""Of stages some of which lead others, which may last for many turns."""
hops = st.sampled_from([0.0, 0.25, 1.5])


@st.composite
def costs_of(draw, num_stages, seconds=seconds):
    def per_stage(values=seconds):
        return draw(st.lists(values, min_size=num_stages, max_size=num_stages))

    link = per_stage(hops) if draw(st.booleans()) else 0.0
    times = (per_stage() for _ in range(3))
    return Costs(*times, hop=per_stage(hops), link=link, update=per_stage(), reduce=per_stage())


def approximately(times):
    return pytest.approx(times, rel=1e-9)


def check(step, whole, costs):
    timeline = simulate(add_update(whole), costs)
    usual = step_in_rows(add_update(whole), timeline.rows)
    assert step.seconds == approximately(timeline.makespan)
    assert step.handed_in == approximately(usual.handed_in)
    assert step.updated == approximately(usual.updated)


@examples(25)
@given(st.data())
def test_a_step_of_many_takes_as_long_as_all_of_its_ops(data):
    short, whole = data.draw(shorter_and_whole(DRAIN))
    costs = data.draw(costs_of(whole.num_stages))
    check(step_of(short, costs, whole.num_microbatches - short.num_microbatches), whole, costs)


@examples(10)
@given(st.data())
def test_all_forwards_first_take_as_long_as_all_of_its_ops(data):
    make, num_ranks = data.draw(orders("gpipe"))
    whole = make(data.draw(st.integers(120, 200)) + 48 * num_ranks)
    short, left_out = shortened(whole)
    assert left_out and len(repetitions_of(short.columns)) == 2
    costs = data.draw(costs_of(whole.num_stages))
    check(step_of(whole, costs), whole, costs)


ZB_H1 = Costs((1.0, 1.0003, 1.001), (1.01, 1.0003, 1.0003), (0.99, 1.001, 1.001), hop=(0, 0, 2.5))
"""Of which a rank leads the others for 564 turns, and for 745 more."""


@examples(25)
@given(st.data())
@example(None)
def test_every_time_behind_the_middle_is_that_of_a_whole_simulation(data):
    """Also of ranks that others lead, for however many turns."""
    name, num_ranks, costs, more = "zb-h1", 3, ZB_H1, 1_500
    if data is not None:
        name, num_ranks = data.draw(st.sampled_from(DRAIN)), 2 * data.draw(st.integers(1, 2))
        more = data.draw(st.integers(1, 400))
    short = abridged(partial(build, name, num_ranks, {}), 10_000, 2 * num_ranks)
    if data is not None:
        costs = data.draw(costs_of(short.num_stages))
    turns = repetitions_of(short.columns)
    whole = with_turns(short, turns, more)
    own, other = passed(short, costs, more * turns[0].microbatches), passed(whole, costs)
    for rank, (end, length) in enumerate(zip(turns[0].ends, turns[0].lengths, strict=True)):
        stop, last = short.columns.first[rank + 1], whole.columns.first[rank + 1]
        behind = stop - end + length
        for times, all_times in zip(own, other, strict=True):
            assert times[stop - behind : stop] == approximately(all_times[last - behind : last])
