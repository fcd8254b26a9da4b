"""The simulator, on columns, against one that goes op by op."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Costs, Schedule, schedules, simulate
from penstock.base.errors import InputError, ScheduleError
from penstock.core.schedule import needs as columns_needs
from penstock.core.schedule.lower import add_agreement, add_recompute, add_update, lower
from tests.oracles import op_by_op

FIXED = [name for name in schedules.names() if name not in schedules.SEARCHED]
PASSES = {
    "nothing": lambda schedule: schedule,
    "recompute": add_recompute,
    "update": add_update,
    "agreement": lambda schedule: add_agreement(add_update(schedule), late=True),
    "all": lambda schedule: lower(add_recompute(schedule, [0])),
}


@pytest.mark.parametrize("many_ranks", [1, 100], ids=["waves", "rank by rank"])
@pytest.mark.parametrize("name", FIXED)
@settings(max_examples=15)
@given(
    p=st.integers(1, 6),
    m=st.integers(1, 12),
    passes=st.sampled_from(sorted(PASSES)),
    seed=st.randoms(use_true_random=False),
)
def test_the_times_are_the_same_to_the_bit(many_ranks, name, p, m, passes, seed):
    try:
        schedule = PASSES[passes](schedules.build(name, num_ranks=p, num_microbatches=m))
    except InputError:
        return
    stages = range(schedule.num_stages)
    # F, I, W, hops, update, recompute, reduce.
    lists = [[round(seed.uniform(0, 2), 9) for _ in stages] for _ in range(7)]
    # Or one number for all stages.
    costs = Costs(*(numbers if seed.random() < 0.7 else numbers[0] for numbers in lists))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns_needs, "_MANY_RANKS", many_ranks)
        assert simulate(schedule, costs) == op_by_op.simulate(schedule, costs)


@pytest.mark.parametrize("hop", [3.0, [3.0, 4.0], [3.0, 4.0, 5.0]])
def test_hops_between_ranks_of_one_stage_take_their_time(hop):
    schedule = Schedule.parse("0F0\n1F0,1B0,0B0\n2F0,2B0")
    costs = Costs(1, 2, 3, hop=hop)
    assert simulate(schedule, costs) == op_by_op.simulate(schedule, costs)


@pytest.mark.parametrize("reduce", [0.0, 9.0])
def test_an_update_waits_for_the_sum_of_all_copies(reduce):
    schedule = add_update(schedules.build("chimera", num_ranks=4, num_microbatches=4))
    costs = Costs(hop=0.25, update=0.5, reduce=reduce)
    assert simulate(schedule, costs) == op_by_op.simulate(schedule, costs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1B0,1F0", "deadlocks: rank 0 waits to run 0B0 for 1B0"),
        ("0F0,0B0\n1F0", "rank 0: 0B0 needs 1B0, which is not in the schedule"),
        ("0B0\n1F0,1B0", "0F0, which is not in the schedule"),
        ("0F0.1,0B0.1", "0F0.1 needs 0F0, which is not in the schedule"),
    ],
)
@pytest.mark.parametrize("many_ranks", [1, 100], ids=["waves", "rank by rank"])
def test_what_cannot_run_is_explained(monkeypatch, text, message, many_ranks):
    monkeypatch.setattr(columns_needs, "_MANY_RANKS", many_ranks)
    schedule = Schedule.parse(text)
    with pytest.raises(ScheduleError, match=message):
        simulate(schedule)


def test_the_time_grows_with_the_ops_not_faster():
    def seconds(schedule):
        started = time.process_time()
        simulate(schedule, Costs(hop=0.1))
        return time.process_time() - started

    def least_seconds(p, m):
        schedule = schedules.build("1f1b", num_ranks=p, num_microbatches=m)
        return min(seconds(schedule) for _ in range(3))

    least_seconds(64, 64)
    small, large = (least_seconds(128, m) for m in (256, 1024))
    # Four times the ops; the margin is for a busy machine.
    assert large < 4 * small * 2.5
