"""What is held, by hand: microbatches, bytes, parts kept for W, recompute, explicit free points."""

import numpy as np
import pytest

from penstock import Costs, Schedule, Sizes, draw, schedules, simulate
from penstock.base.errors import InputError
from penstock.core.schedule.lower import add_free, add_recompute, lower
from penstock.core.schedule.memory import (
    Load,
    Moments,
    changes,
    distinct_rows,
    loads,
    peak_activations,
    peaks,
    units,
)
from penstock.core.schedule.op import Kind

SPLIT = Schedule.parse("0F0,0F1,0I0,0I1,0W0,0W1")


def test_a_microbatch_counts_until_its_weight_gradient():
    assert peak_activations(SPLIT.ranks) == (2,)
    assert peak_activations(Schedule.parse("0F0,0I0,0W0,0F1,0I1,0W1").ranks) == (1,)
    assert simulate(SPLIT).in_flight == (((0, 0), (0, 1), (1, 2), (5, 1), (6, 0)),)


def test_bytes_count_the_part_kept_for_the_weight_gradient_at_its_own_size():
    sizes = Sizes([10.0], kept_for_weight=[3.0])
    timeline = simulate(SPLIT)
    assert timeline.held(sizes) == (((0, 0), (0, 10), (1, 20), (3, 13), (4, 6), (5, 3), (6, 0)),)
    early = Schedule.parse("0F0,0I0,0F1,0I1,0W0,0W1")
    assert peaks(early.ranks, sizes) == (13,)
    assert peaks(early.ranks, Sizes([10.0])) == (20,)


def test_a_microbatch_with_a_large_number_counts_as_one():
    assert peak_activations(Schedule.parse("0F2147483647,0B2147483647").ranks) == (1,)


def test_explicit_free_points_count_where_they_are():
    late = Schedule.parse("0F0,0B0,0F1,0FREE0,0B1,0FREE1")
    assert peak_activations(late.ranks) == (2,)
    assert peaks(add_free(SPLIT).ranks, Sizes([10.0], [3.0])) == (20,)
    parts = Schedule.parse("0F0,0I0,0F1,0FREE_I0,0I1,0FREE_I1,0W0,0FREE0,0W1,0FREE1")
    assert peaks(parts.ranks, Sizes([10.0], [3.0])) == (20,)


def test_passes_do_not_change_what_is_held():
    for name in ("1f1b", "zb-h2", "chimera", "dualpipe-v"):
        schedule = schedules.build(name, num_ranks=4, num_microbatches=8)
        assert peak_activations(lower(schedule).ranks) == peak_activations(schedule.ranks)


LEAVING = {
    # What leaves keeps its room until the next of its kind: 10, then 20, then 10 at a time.
    "one after the other": (
        "0F0,0LEAVE_S0,0F1,0LEAVE_S1,0FETCH_S0,0B0,0FETCH_S1,0B1",
        (10, 0, 10, -10, 0, -10, 10, -10),
    ),
    "both at once": (
        "0F0,0F1,0LEAVE_S0,0LEAVE_S1,0FETCH_S1,0FETCH_S0,0B0,0B1",
        (10, 10, 0, -10, 0, 10, -10, -10),
    ),
    "two stages": (
        "0F0,0LEAVE_S0,1F0,1LEAVE_S0,1FETCH_S0,1B0,0FETCH_S0,0B0",
        (10, 0, 3, -10, 0, -3, 10, -10),
    ),
    "split backwards": ("0F0,0I0,0W0,0F1,0I1,0W1", (10, -6, -4, 10, -6, -4)),
}


@pytest.mark.parametrize("case", LEAVING)
def test_what_each_op_changes(case):
    text, expected = LEAVING[case]
    ops = Schedule.parse(text).ranks[0]
    at_start, change = changes(ops, Sizes([10.0, 3.0], kept_for_weight=[4.0, 1.0]))
    assert tuple(change) == expected
    assert [*at_start] == [op.kind.value in ("F", "LEAVE_S", "FETCH_S") for op in ops]


def test_recompute_keeps_the_input_until_the_forward_runs_again():
    schedule = schedules.build("gpipe", num_ranks=1, num_microbatches=3)
    sizes = Sizes([10.0], stage_input=[1.0])
    again = add_recompute(schedule)
    assert peaks(schedule.ranks, sizes) == (30,)
    # Three inputs, of which one has grown to its activations again.
    assert peaks(again.ranks, sizes) == (12,)
    assert peak_activations(again.ranks) == (1,)
    costs = Costs(forward=2, backward_input=1, backward_weight=1)
    assert simulate(again, costs).makespan == 3 * (2 + 2 + 2)
    assert simulate(again, Costs(2, 1, 1, recompute=0.5)).makespan == 3 * (2 + 0.5 + 2)


def test_a_share_of_the_ranks_layers_is_the_unit():
    v = schedules.build("zb-v", num_ranks=2, num_microbatches=4)
    chimera = schedules.build("chimera", num_ranks=4, num_microbatches=4)
    assert units(v.ranks) == (2, 2)
    assert units(chimera.ranks) == (1, 1, 1, 1)
    # Of two stages that a rank of Chimera holds, each microbatch visits one.
    assert max(peak_activations(chimera.ranks)) == 4


def test_a_slice_holds_its_share():
    sliced = schedules.build("seq1f1b", num_ranks=2, num_microbatches=4, num_slices=4)
    assert peak_activations(sliced.ranks, 4) == (1.25, 1)
    assert simulate(sliced).peak_activations == (1.25, 1)
    assert simulate(sliced).peak_bytes(Sizes([8.0, 80.0])) == (10, 80)


def moments_of(schedule):
    return Moments.of_ranks(schedule.rank_ops)[0]


def test_the_moments_that_may_be_the_worst():
    # One whole and one half are never more than the larger of two whole ones and two halves.
    assert set(loads(moments_of(SPLIT))) == {Load(whole=2), Load(for_weight=2)}
    gpipe = moments_of(schedules.build("gpipe", num_ranks=1, num_microbatches=3))
    assert set(loads(gpipe, again=(0,))) == {Load(inputs=3), Load(inputs=2, whole=1)}
    plain = moments_of(schedules.build("1f1b", num_ranks=2, num_microbatches=4))
    assert loads(plain) == (Load(whole=2),)
    assert loads(moments_of(Schedule(((),)))) == (Load(),)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sizes([1.0], [1.0, 1.0]), "kept_for_weight has 2 numbers, but activation has 1"),
        (lambda: Sizes([-1.0]), r"activation is -1\.0, but must be ≥ 0 and finite"),
        (lambda: Sizes(["a"]), "activation is 'a', but must be a number"),
        (lambda: Sizes([float("nan")]), "activation is nan"),
        (lambda: simulate(SPLIT).peak_bytes(3), "sizes is of type int; give a penstock.Sizes"),
        (lambda: simulate(SPLIT, [1, 1]), "costs is of type list; give a penstock.Costs"),
        (lambda: draw(simulate(SPLIT), 5), "the path is of type int; end it in"),
        (lambda: Sizes(3), "activation is 3; give a list"),
        (lambda: simulate(SPLIT).peak_bytes(Sizes([1.0, 1.0])), "2 numbers, but .* has 1 stages"),
    ],
)
def test_sizes_that_do_not_fit(make, message):
    with pytest.raises(InputError, match=message):
        make()


def counted(ops, stages):
    """Op by op: all that a rank ever holds, (inputs only, whole, for the weight gradient) of each
    of its stages."""
    recomputed = {op.stage for op in ops if op.kind is Kind.RECOMPUTE}
    held = {stage: [0, 0, 0] for stage in stages}
    reached = {(0,) * (3 * len(stages))}
    for op in ops:
        inputs, whole, for_weight = held[op.stage]
        held[op.stage] = {
            Kind.FORWARD: (
                [inputs + 1, whole, for_weight]
                if op.stage in recomputed
                else [inputs, whole + 1, for_weight]
            ),
            Kind.RECOMPUTE: [inputs - 1, whole + 1, for_weight],
            Kind.BACKWARD: [inputs, whole - 1, for_weight],
            Kind.BACKWARD_INPUT: [inputs, whole - 1, for_weight + 1],
            Kind.BACKWARD_WEIGHT: [inputs, whole, for_weight - 1],
        }[op.kind]
        reached.add(tuple(part for stage in stages for part in held[stage]))
    return sorted(map(list, reached))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-zb", "chimera"])
@pytest.mark.parametrize("recomputed", [0, 1, 8])
def test_moments_are_all_that_a_rank_ever_holds(name, recomputed):
    schedule = schedules.build(name, num_ranks=4, num_microbatches=8)
    again = range(min(recomputed, schedule.num_stages))
    running = add_recompute(schedule, again)
    sizes = [(1.0 + stage, 40.0 - 7 * stage, 3.0 * stage) for stage in range(8)]
    of_ranks = Moments.of_ranks(schedule.rank_ops)
    for plain, ops, moments in zip(schedule.rank_ops, running.rank_ops, of_ranks, strict=True):
        held = counted(running.columns.ops(ops.span), plain.stages)
        assert "as_tuple" not in vars(plain)  # of millions of ops, no object each
        assert moments.rows(again).tolist() == held
        flat = [size for stage in plain.stages for size in sizes[stage]]
        assert moments.most_bytes(sizes.__getitem__, again) == max(np.array(held) @ flat)


def test_rows_are_told_apart_also_where_their_numbers_do_not_fit_in_one():
    generator = np.random.default_rng(0)
    rows = generator.integers(-(2**40), 2**40, (50, 6))[generator.integers(0, 50, 400)]
    rows[:, :2] //= 2**39
    assert np.array_equal(distinct_rows(rows), np.unique(rows, axis=0))
