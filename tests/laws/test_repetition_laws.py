"""What holds for schedules without most of their middle: they are those of many microbatches but
for turns of the same, and steps of many come to what a simulation of every op says."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Costs, schedules, simulate, versions
from penstock.core.schedule import families, repetition
from penstock.core.schedule.lower import add_recompute, add_update
from penstock.core.schedule.memory import Sizes, moments, peaks
from penstock.core.schedule.repetition import abridged, repetitions_of, shortened, with_turns
from penstock.core.timing.simulator.step import step_in_timeline, step_of
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
def shorter_and_whole(draw, name):
    """A schedule, and the same without most of its middle; some stages run forward twice."""
    make, num_ranks = draw(orders(name))
    whole = make(draw(st.integers(100, 130)) + 48 * num_ranks)
    short = abridged(make, whole.num_microbatches, 2 * num_ranks)
    assert short is not None
    again = sorted(draw(st.sets(st.integers(0, whole.num_stages - 1))))
    if not again or name in versions.USUAL:
        return short, whole
    return add_recompute(short, again), add_recompute(whole, again)


@pytest.mark.parametrize("name", FAMILIES)
@examples(6)
@given(st.data())
def test_a_long_schedule_is_a_short_one_with_more_turns(name, data):
    short, whole = data.draw(shorter_and_whole(name))
    turns = repetitions_of(short.columns)
    more, rest = divmod(whole.num_microbatches - short.num_microbatches, turns[0].microbatches)
    assert not rest and more > 0
    assert with_turns(short, turns, more) == whole
    assert with_turns(whole, repetitions_of(whole.columns), -more) == short
    sizes = Sizes([1.0 + stage for stage in range(whole.num_stages)])
    held = (peaks(s.rank_ops, sizes, s.num_slices, s.activations) for s in (short, whole))
    assert next(held) == pytest.approx(next(held), rel=1e-12)
    if whole.num_slices == 1:
        for own, other in zip(short.rank_ops, whole.rank_ops, strict=True):
            assert moments(own).tolist() == moments(other).tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_some_hundred_microbatches_are_enough_for_a_million(name):
    asked = []

    def counted(num_microbatches):
        asked.append(num_microbatches)
        return build(name, 4, {}, num_microbatches)

    assert abridged(counted, 1_000_003, 8) is not None
    assert max(asked) <= 200


@pytest.mark.parametrize("name", sorted(families.HOLD_ALL))
def test_where_turns_hold_more_and_more_nothing_is_left_out(name):
    assert abridged(partial(build, name, 3, {}), 1_000_000, 6) is None


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
    assert step.seconds == approximately(timeline.makespan)
    for span in timeline.spans:
        assert span.op.stage < len(step.updated)
    usual = step_in_timeline(add_update(whole), timeline)
    assert (step.handed_in, step.updated) == (
        approximately(usual.handed_in), approximately(usual.updated)
    )  # fmt: skip


@pytest.mark.parametrize("name", DRAIN)
@examples(8)
@given(st.data())
def test_a_step_of_many_takes_as_long_as_all_of_its_ops(name, data):
    short, whole = data.draw(shorter_and_whole(name))
    costs = data.draw(costs_of(whole.num_stages))
    left_out = whole.num_microbatches - short.num_microbatches
    check(step_of(short, costs, left_out), whole, costs)


@examples(20)
@given(st.data())
def test_all_forwards_first_take_as_long_as_all_of_its_ops(data):
    make, num_ranks = data.draw(orders("gpipe"))
    whole = make(data.draw(st.integers(120, 200)) + 48 * num_ranks)
    short, left_out = shortened(whole)
    assert left_out and len(repetitions_of(short.columns)) == 2
    costs = data.draw(costs_of(whole.num_stages))
    check(step_of(whole, costs), whole, costs)
