"""What the searched family takes, and how it says what it cannot take."""

from __future__ import annotations

import pytest

from penstock import check, schedules
from penstock.base.errors import InputError
from penstock.core.schedule.durations import UnitDurations, loop, snake
from penstock.core.schedule.families.searched import _seeds
from penstock.core.schedule.lower import split_backward
from penstock.core.schedule.search import OrderingProblem, whole_ranks
from penstock.core.schedule.search.problem import Sizes

KEEPS_HALF = Sizes((1.0, 1.0), (0.5, 0.5))


def zb_auto(**options):
    return schedules.build("zb-auto", num_ranks=2, num_microbatches=4, **options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"costs": 3}, r"zb-auto: costs is of type int; give a penstock\.Costs"),
        (
            {"sizes": 3, "activation_limit": 2},
            r"zb-auto: sizes is of type int; give a penstock\.Sizes",
        ),
        ({"sizes": KEEPS_HALF}, "sizes are given, but no activation_limit in their unit"),
        (
            {"sizes": Sizes((1.0, 1.0), (1.0, 1.5)), "activation_limit": 2},
            r"stage 1 keeps 1\.5 for its weight gradient, more than its whole activation of 1\.0",
        ),
        ({"sizes": Sizes((1.0,), (0.5,)), "activation_limit": 2}, "has 2 stages; give one per"),
        ({"activation_limit": 0.5}, "the limit of rank 0 is 0.5, but one microbatch alone holds 1"),
        ({"objective": "speed"}, "zb-auto: objective"),
        ({"effort": -1}, "zb-auto: effort is -1"),
    ],
)
def test_what_cannot_be_searched_is_told(options, told):
    with pytest.raises(InputError, match=told):
        zb_auto(**options)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_sizes_and_limits_are_kept(limit):
    """A limit of so many microbatches, in the unit of the sizes."""
    found = zb_auto(sizes=Sizes((10.0, 10.0), (5.0, 5.0)), activation_limit=10 * limit)
    check(found)
    for ops in found.ranks:
        held = most = 0.0
        for op in ops:
            held += {"F": 10.0, "I": -5.0, "W": -5.0}[op.kind.value]
            most = max(most, held)
        assert most <= 10 * limit


STRAIGHT = ["gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2"]
V = ["zb-v", "v-half", "v-min"]
LOOP = ["interleaved-1f1b", "breadth-first", "interleaved-zb"]


@pytest.mark.parametrize(
    ("placement", "num_microbatches", "families", "options"),
    [
        ((0, 1), 1, STRAIGHT, {}),
        ((0, 1), 5, STRAIGHT, {}),
        (snake(2, 2), 1, V, {}),
        (snake(2, 2), 2, [*V, "hanayo"], {}),
        (snake(2, 2), 3, [*V, "hanayo"], {}),
        (snake(2, 2), 4, [*V, "dualpipe-v", "hanayo"], {}),
        (snake(2, 2), 5, [*V, "dualpipe-v", "hanayo"], {}),
        (snake(2, 4), 1, [], {}),
        (snake(2, 4), 2, ["hanayo"], {"num_waves": 2}),
        (loop(2, 2), 4, LOOP, {"stages_per_rank": 2}),
        (loop(2, 3), 2, LOOP, {"stages_per_rank": 3}),
        (snake(3, 2), 2, V, {}),
        (snake(3, 2), 5, [*V, "hanayo"], {}),
        (snake(3, 2), 6, [*V, "dualpipe-v", "hanayo"], {}),
        (snake(3, 4), 3, ["hanayo"], {"num_waves": 2}),
        (snake(3, 6), 3, ["hanayo"], {"num_waves": 3}),
        (loop(3, 2), 6, LOOP, {"stages_per_rank": 2}),
        ((1, 0), 4, [], {}),
        ((0, 1, 1, 0, 0, 1), 4, [], {}),
    ],
)
def test_a_search_begins_with_all_families_of_its_placement(
    placement, num_microbatches, families, options
):
    num_ranks = len({*placement})
    problem = OrderingProblem(
        placement=placement,
        num_microbatches=num_microbatches,
        durations=UnitDurations(),
        sizes=whole_ranks(placement),
        limits=(99.0,) * num_ranks,
        objective="makespan",
    )
    whole = [
        schedules.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, **options)
        for name in families
    ]
    split = [split_backward(schedule) for schedule in whole]
    expected = [*whole, *(half for half, full in zip(split, whole, strict=True) if half != full)]
    assert _seeds(problem) == [problem.orders(schedule) for schedule in expected]
