"""Families, passes and memory on columns against the same op by op."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Costs, Schedule, check, schedules, simulate
from penstock.base.errors import InputError
from penstock.core.schedule import lower
from penstock.core.schedule.columns import Columns
from penstock.core.schedule.families.bidirectional import Slots
from penstock.core.schedule.families.layout import Phases, Turns
from penstock.core.schedule.lower import add_free
from penstock.core.schedule.memory import Sizes, peak_activations, peaks
from penstock.core.schedule.rounds import Rounds
from tests.oracles import op_by_op

FAMILIES = [name for name in schedules.names() if name not in schedules.SEARCHED]
OPTIONS = {
    "interleaved-1f1b": [{"stages_per_rank": 1}, {"stages_per_rank": 3}],
    "interleaved-zb": [{"stages_per_rank": 1}, {"stages_per_rank": 3}],
    "breadth-first": [{"stages_per_rank": 1}, {"stages_per_rank": 3}],
    "seq1f1b": [{"num_slices": 1}, {"num_slices": 3}],
    "gpipe": [{"replicas": (1, 2, 1)}],
    "1f1b": [{"replicas": (2, 1, 1)}],
    "pipedream": [{"replicas": (1, 1, 2)}],
}
CASES = [(name, options) for name in FAMILIES for options in ({}, *OPTIONS.get(name, ()))]


ORDERS = {Turns: op_by_op.turns, Slots: op_by_op.slots, Phases: op_by_op.phases}


def op_by_op_fields(order):
    return Columns.of_ranks([ORDERS[type(order)](order)]).fields()


def both(name, num_ranks, num_microbatches, options):
    """The same schedule op by op and as columns."""
    counts = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    columns = schedules.build(name, **counts, **options)
    with pytest.MonkeyPatch.context() as patch:
        for kind in ORDERS:
            patch.setattr(kind, "fields", op_by_op_fields)
        return schedules.build(name, **counts, **options), columns


@pytest.mark.parametrize(("name", "options"), CASES)
@given(p=st.integers(1, 6), m=st.integers(1, 14))
def test_columns_are_what_the_ops_are(name, options, p, m):
    p = sum(options.get("replicas", (p,)))
    try:
        by_ops, columns = both(name, p, m, options)
    except InputError:
        return
    assert columns.name == by_ops.name
    for asked in ("num_ranks", "num_ops", "num_stages", "num_microbatches", "num_slices"):
        assert getattr(columns, asked) == getattr(by_ops, asked)
    assert columns.stages_of == by_ops.stages_of
    assert columns.splits_backward == by_ops.splits_backward
    assert columns == by_ops
    assert [type(op) for own in columns.ranks for op in own] == [
        type(op) for own in by_ops.ranks for op in own
    ]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "seq1f1b"])
def test_a_timeline_measures_columns_as_ops(name):
    by_ops, columns = both(name, 4, 8, {})
    costs = Costs(1.1, 1.3, 0.7, hop=0.1)
    expected, timeline = op_by_op.simulate(by_ops, costs), simulate(columns, costs)
    asked = ("makespan", "busy", "bubble", "stage_bubble", "peak_activations", "in_flight")
    for name_ in (*asked, "stages_of", "num_slices", "spans", "schedule"):
        assert getattr(timeline, name_) == getattr(expected, name_)
    assert timeline == expected
    assert peak_activations(columns.ranks) == peak_activations(timeline_ops(timeline))


def timeline_ops(timeline):
    return [row.ops for row in timeline.rows]


@settings(max_examples=60)
@given(
    case=st.sampled_from(CASES),
    p=st.integers(1, 5),
    m=st.integers(1, 9),
    before=st.sampled_from(["nothing", "free", "shared"]),
    together=st.booleans(),
    data=st.data(),
)
def test_passes_do_to_columns_what_they_do_to_ops(case, p, m, before, together, data):
    name, options = case
    p = sum(options.get("replicas", (p,)))
    try:
        schedule, _ = both(name, p, m, options)
    except InputError:
        return
    stages = data.draw(st.sets(st.integers(0, schedule.num_stages - 1)))
    if before == "free":
        schedule = add_free(schedule)

    def passed(by):
        reduced = by.add_reduce(schedule, shared=stages) if before == "shared" else schedule
        updated = by.add_update(reduced, together=together)
        freed = () if before == "free" else (by.add_free(schedule),)
        return by.add_recompute(schedule, stages), updated, *freed

    expected, columns = passed(op_by_op), passed(lower)
    assert columns == expected
    for own in columns:
        assert "ranks" not in vars(own)
        # Sizes of which no sum is exact: the order in which they are added shows.
        sizes = Sizes(
            *([0.1 * (place + 3) ** part for place in range(own.num_stages)] for part in (1, 2, 3))
        )
        held = peaks(own.rank_ops, sizes, own.num_slices)
        assert held == op_by_op.peaks(own.ranks, sizes, own.num_slices)


@settings(max_examples=60)
@given(
    case=st.sampled_from(CASES),
    p=st.integers(1, 5),
    m=st.integers(1, 9),
    fewer=st.integers(1, 9),
    late=st.booleans(),
    per_update=st.sampled_from([None, 3]),
)
def test_updates_and_halves_are_the_same_in_columns(case, p, m, fewer, late, per_update):
    name, options = case
    p = sum(options.get("replicas", (p,)))
    try:
        schedule, _ = both(name, p, m, options)
    except InputError:
        return
    copies = [schedule.copies[stage] for stage in range(schedule.num_stages)]
    rounds = Rounds(tuple(copies))
    if per_update is not None:
        rounds = Rounds.of_minibatches(copies, per_update, schedule.num_microbatches)

    def passed(by):
        return (
            by.split_backward(schedule),
            by.forward_only(schedule),
            by.first_microbatches(schedule, fewer),
            by.add_agreement(by.add_update(schedule, together=not late), late=late),
            by.add_late_agreement(by.add_late_update(schedule)),
            by.add_updates(schedule, rounds),
        )

    assert passed(lower) == passed(op_by_op)


def test_ops_are_not_made_before_somebody_looks_at_them():
    schedule = schedules.build("1f1b", num_ranks=64, num_microbatches=1024)
    check(schedule)
    timeline = simulate(schedule)
    assert timeline.makespan == (1024 + 63) * 3
    assert timeline.bubble == pytest.approx(63 / (1024 + 63))
    assert max(timeline.peak_activations) == 64
    assert "ranks" not in vars(schedule)
    ops = timeline.rows[0].ops
    assert "as_tuple" not in vars(ops)
    assert schedule.ranks[0] == ops
    assert schedule.ranks[0] is ops.as_tuple


def test_a_schedule_of_columns_is_a_schedule():
    import copy
    import pickle

    by_ops, columns = both("1f1b", 2, 3, {})
    copies = copy.copy(columns), copy.deepcopy(columns), pickle.loads(pickle.dumps(columns))
    for same in copies:
        assert same == by_ops
        assert hash(same) == hash(by_ops)
    assert repr(columns) == repr(by_ops)
    assert Schedule.parse(str(columns)) == by_ops
    with pytest.raises(AttributeError, match="colour"):
        getattr(columns, "colour")  # noqa: B009
