"""Messages that keep a link busy: by hand, and what must hold for any schedule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Costs, Schedule, schedules, simulate
from penstock.base.errors import InputError
from penstock.core.schedule.lower import add_communication
from tests.kit.helpers import runnable_families

FAMILIES = [*runnable_families(), "chimera", "pipedream", "seq1f1b"]
numbers = st.integers(0, 8).map(float)


def starts(schedule, costs):
    return {str(span.op): span.start for span in simulate(schedule, costs).spans}


def test_a_message_waits_for_the_one_before_it():
    two = Schedule.parse("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2")
    found = starts(two, Costs(forward=1, hop=4, link=3))
    # Outputs are there at 1, 2 and 3, and leave at 1, 4 and 7.
    assert [found[f"1F{number}"] for number in range(3)] == [5, 8, 11]
    free = starts(two, Costs(forward=1, hop=4))
    assert [free[f"1F{number}"] for number in range(3)] == [5, 6, 7]


def test_both_directions_and_other_pairs_of_ranks_are_links_of_their_own():
    text = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"
    # 0F1 leaves at 6; 1B0 leaves at 9 in the other direction and waits for nobody.
    found = starts(Schedule.parse(text), Costs(hop=5, link=5))
    assert (found["1F0"], found["1F1"], found["0B0"]) == (6, 11, 14)
    fan = Schedule.parse("0F0,0F1,0B0,0B1\n1F0,1B0\n1F1,1B1")
    found = starts(fan, Costs(hop=5, link=5))
    assert (found["1F0"], found["1F1"]) == (6, 7)


def test_each_edge_keeps_its_own_link_busy():
    schedule = schedules.build("gpipe", num_ranks=3, num_microbatches=2)
    found = starts(schedule, Costs(hop=[9, 9], link=[2, 7]))
    assert (found["1F0"], found["1F1"]) == (10, 12)
    assert (found["2F0"], found["2F1"]) == (20, 27)
    # Back over the second edge: 2B0 ends at 30, 2B1 at 32, but leaves at 37.
    assert (found["1B0"], found["1B1"]) == (39, 46)


def test_stages_on_one_rank_use_no_link():
    assert starts(Schedule.parse("0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1"), Costs(link=50))["0B1"] == 10


@st.composite
def cases(draw):
    """(schedule, costs without links, seconds that messages keep them busy)."""
    name, ranks = draw(st.sampled_from(FAMILIES)), draw(st.integers(2, 4))
    try:
        schedule = schedules.build(name, num_ranks=ranks, num_microbatches=draw(st.integers(1, 8)))
    except InputError:
        schedule = schedules.build("1f1b", num_ranks=ranks, num_microbatches=8)

    def each():
        return [draw(numbers) for _ in range(schedule.num_stages)]

    costs = {name: each() for name in ("forward", "backward_input", "backward_weight", "hop")}
    return schedule, costs, each()


@given(cases())
def test_busy_links_never_make_a_step_faster(case):
    schedule, costs, link = case
    free, busy = (starts(schedule, Costs(**costs, link=value)) for value in (0.0, link))
    assert all(busy[op] >= start for op, start in free.items())


@given(cases())
def test_lowered_or_not_the_times_are_the_same(case):
    schedule, costs, link = case
    found = Costs(**costs, link=link)
    lowered = starts(add_communication(schedule), found)
    assert starts(schedule, found).items() <= lowered.items()


@given(cases())
def test_links_that_are_free_again_before_the_next_message_change_nothing(case):
    schedule, costs, _ = case
    # A rank sends at most one message per op, so the shortest op is the least time between two.
    least = min(*costs["forward"], *costs["backward_input"]) / schedule.num_slices
    seldom_busy, never_busy = Costs(**costs, link=least), Costs(**costs)
    assert simulate(schedule, seldom_busy).rows == simulate(schedule, never_busy).rows


@given(cases())
def test_a_slow_link_carries_its_messages_one_after_another(case):
    schedule, costs, link = case
    makespan = simulate(schedule, Costs(**costs, link=link)).makespan
    sent: dict[tuple[int, int, int], int] = {}
    for op, rank in schedule.where.items():
        target = schedule.where.get(op._replace(stage=op.stage + 1))
        if op.kind.value == "F" and target not in (None, rank):
            sent[op.stage, rank, target] = sent.get((op.stage, rank, target), 0) + 1
    for (stage, _, _), count in sent.items():
        # The last message is on its way for its hop, however soon the link is free again.
        assert makespan >= (count - 1) * link[stage] + costs["hop"][stage]


@pytest.mark.parametrize("bad", [-1, float("nan"), [1, -1], "1"])
def test_what_links_cost_is_checked(bad):
    with pytest.raises(InputError, match="costs: link is"):
        Costs(link=bad)
