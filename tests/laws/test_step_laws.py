"""What holds for the short ways to the length of a step: they come to what the simulation says, to
the last bit."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from penstock import Costs, schedules, simulate
from penstock.base.errors import InputError
from penstock.core.schedule.lower import add_recompute, add_update
from penstock.core.schedule.op import Kind
from penstock.core.timing.costs import Exchange
from penstock.core.timing.simulator.step import step_of, two_pipelines
from tests.kit.helpers import amounts

FAMILIES = (
    "1f1b", "gpipe", "eager-1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "zb-v", "v-half"
)  # fmt: skip


@st.composite
def replicated(draw):
    """A schedule, often with equally many copies of all stages."""
    family, num_stages = draw(st.sampled_from(FAMILIES)), draw(st.integers(1, 6))
    counts, options = (1,) * num_stages, {}
    if family in ("1f1b", "gpipe"):
        if draw(st.booleans()):
            counts = (draw(st.integers(1, 4)),) * num_stages
        else:
            counts = tuple(draw(st.integers(1, 3)) for _ in range(num_stages))
        options = {"replicas": counts}
    num_microbatches, num_ranks = draw(st.integers(max(counts), 12)), sum(counts)
    if family in ("interleaved-1f1b", "zb-v") and draw(st.booleans()):
        width = draw(st.integers(2, 3))
        options, num_ranks = {"replicas": (width,) * 2 * num_stages}, width * num_stages
    try:
        schedule = schedules.build(
            family, num_ranks=num_ranks, num_microbatches=num_microbatches, **options
        )
    except InputError:
        assume(False)
    again = draw(st.sets(st.integers(0, schedule.num_stages - 1)))
    return add_recompute(schedule, sorted(again)) if again else schedule


exchanges = st.builds(
    Exchange,
    st.integers(1, 4),
    st.lists(amounts(2), min_size=1, max_size=3).map(tuple),
    amounts(1),
)


@st.composite
def costs_for(draw, num_stages):
    def per_stage(most=2):
        return draw(st.lists(amounts(most), min_size=num_stages, max_size=num_stages))

    of_sums = [draw(st.none() | exchanges) for _ in range(num_stages)]
    return Costs(
        per_stage(),
        per_stage(),
        per_stage(),
        hop=per_stage(),
        link=draw(st.just(0.0) | st.just(per_stage(5))),
        update=per_stage(),
        reduce=per_stage(),
        exchanges=draw(st.just(()) | st.just(of_sums)),
    )


@given(st.data())
def test_a_step_without_its_timeline_is_as_long(data):
    schedule = data.draw(replicated())
    costs = data.draw(costs_for(schedule.num_stages))
    step, timeline = step_of(schedule, costs), simulate(add_update(schedule), costs)
    assert step.seconds == timeline.makespan
    for stage, (handed_in, updated) in enumerate(zip(step.handed_in, step.updated, strict=True)):
        spans = [span for span in timeline.spans if span.op.stage == stage]
        updates = [span.start for span in spans if span.op.kind is Kind.UPDATE]
        done = [span.end for span in spans if span.op.kind is not Kind.UPDATE]
        assert max(updates) == updated
        assert max(done) == handed_in


SIDE_BY_SIDE = ("1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "interleaved-zb", "zb-v", "v-half")


@given(st.data())
def test_two_of_equal_pipelines_beside_cards_of_their_own_take_as_long_as_all(data):
    depth, width = data.draw(st.integers(1, 3)), data.draw(st.integers(3, 5))
    family, num_ranks = data.draw(st.sampled_from(SIDE_BY_SIDE)), depth * width
    alone = schedules.build(family, num_ranks=depth, num_microbatches=2)
    num_stages = alone.num_stages
    schedule = schedules.build(
        family,
        num_ranks=num_ranks,
        num_microbatches=data.draw(st.integers(width, 12)),
        replicas=(width,) * num_stages,
    )
    near = data.draw(st.sampled_from(["pipelines", "copies", "nobody", "any"]))
    hosts = {
        "pipelines": [rank % width for rank in range(num_ranks)],
        "copies": [rank // width for rank in range(num_ranks)],
        "nobody": [*range(num_ranks)],
        "any": data.draw(st.lists(st.integers(0, 3), min_size=num_ranks, max_size=num_ranks)),
    }[near]
    costs = data.draw(costs_for(num_stages))
    if data.draw(st.booleans()):
        costs = replace(costs, cards=tuple(range(num_ranks)), hosts=hosts)
    two = two_pipelines(schedule, costs)
    assert two is not None or near == "any" or schedule.num_microbatches % width
    if two is not None:
        assert two[0].num_ranks == 2 * depth
        alone = simulate(add_update(two[0]), two[1])
        assert alone.makespan == simulate(add_update(schedule), costs).makespan


def test_pipelines_that_share_cards_are_not_taken_for_each_other():
    schedule = schedules.build("1f1b", num_ranks=6, num_microbatches=6, replicas=(3, 3))
    shared = Costs(cards=(0, 0, 1, 2, 2, 3), hosts=(0, 0, 1, 2, 2, 3))
    assert two_pipelines(schedule, shared) is None


def test_what_a_sum_passes_on_a_rank_is_no_link():
    """The third thing that the sum of stage 0 passes on rank 0 is not the link from rank 2 to it,
    which a gradient keeps busy until 6."""
    schedule = schedules.build(
        "interleaved-1f1b", num_ranks=6, num_microbatches=2, replicas=(2,) * 6
    )
    free = [0.0] * 6
    exchanges = [Exchange(1, (0.0, 0.0, 0.0)), *[None] * 5]
    costs = Costs(free, free, free, link=[3.0, *free[1:]], exchanges=exchanges)
    assert simulate(add_update(schedule), costs).makespan == 3.0


def test_what_ranks_share_takes_a_whole_simulation():
    schedule = schedules.build("1f1b", num_ranks=2, num_microbatches=4)
    assert step_of(schedule, Costs(cards=(0, 0), hosts=(0, 0))) is None
