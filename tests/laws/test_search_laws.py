"""What holds for every order that zb-auto finds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning.search_and_scale import gaps_to_the_optimum, length
from penstock import Costs, Sizes, check, schedules, simulate
from penstock.base.errors import InputError
from penstock.core.schedule.durations import loop, snake
from penstock.core.schedule.lower import lower
from penstock.core.schedule.memory import peak_activations, peaks
from penstock.core.schedule.search import OrderingProblem, whole_ranks
from tests.kit.examples import TIMES, examples, more
from tests.kit.helpers import amounts

FIXED = [name for name in schedules.names() if name not in schedules.SEARCHED]
PLACEMENTS = {"straight": lambda p: tuple(range(p)), "v": lambda p: snake(p, 2)}
seconds = st.floats(0.1, 3)


def value(schedule, costs, objective):
    return length(simulate(schedule, costs), objective)


@st.composite
def costs_for(draw, num_stages):
    """Random costs of every stage and link."""
    per_stage = st.lists(seconds, min_size=num_stages, max_size=num_stages)
    hops = st.lists(amounts(1), min_size=num_stages - 1, max_size=num_stages - 1)
    return Costs(draw(per_stage), draw(per_stage), draw(per_stage), draw(hops))


def fixed_families(placement, p, m):
    """The fixed families with this placement, whatever they are called."""
    for name in FIXED:
        try:
            schedule = schedules.build(name, num_ranks=p, num_microbatches=m)
        except InputError:
            continue
        ranks = {(op.stage, rank) for op, rank in schedule.where.items()}
        if schedule.num_slices == 1 and ranks == set(enumerate(placement)):
            yield schedule


@pytest.mark.parametrize("objective", ["makespan", "stage"])
@pytest.mark.parametrize("name", PLACEMENTS)
@examples(10)
@given(p=st.integers(1, 5), m=st.integers(1, 10), data=st.data())
def test_never_worse_than_any_fixed_family_with_the_same_memory(name, objective, p, m, data):
    placement = PLACEMENTS[name](p)
    costs = data.draw(costs_for(len(placement)))
    rivals = list(fixed_families(placement, p, m))
    for rival in data.draw(st.lists(st.sampled_from(rivals), min_size=1, max_size=2)):
        found = schedules.build(
            "zb-auto",
            num_ranks=p,
            num_microbatches=m,
            costs=costs,
            placement=name,
            activation_limit=max(peak_activations(rival.ranks)),
            objective=objective,
            effort=0.05,
        )
        # Sums of the same seconds in another order may differ in their last digits.
        assert value(found, costs, objective) <= value(rival, costs, objective) * (1 + 1e-12)


@examples(8)
@given(p=st.integers(1, 5), m=st.integers(1, 8), laps=st.integers(1, 3), data=st.data())
def test_an_order_is_complete_runs_in_any_channel_and_keeps_to_its_limits(p, m, laps, data):
    placement = data.draw(st.sampled_from([loop(p, laps), snake(p, laps)]))
    costs = data.draw(costs_for(len(placement)))
    bytes_per_stage = [data.draw(st.floats(0.5, 2)) for _ in placement]
    share = data.draw(amounts(1))
    sizes = Sizes(bytes_per_stage, [share * one for one in bytes_per_stage])
    least = [
        sum(held for held, own in zip(bytes_per_stage, placement, strict=True) if own == rank)
        for rank in range(p)
    ]
    limits = [one * data.draw(st.floats(1, 3)) for one in least]
    found = schedules.build(
        "zb-auto",
        num_ranks=p,
        num_microbatches=m,
        costs=costs,
        sizes=sizes,
        activation_limit=limits,
        placement=placement,
        effort=0.05,
    )
    check(found)
    check(lower(found, capacity=1), capacity=1)
    for held, limit in zip(peaks(found.ranks, sizes), limits, strict=True):
        assert held <= limit * (1 + 1e-6)
    timeline = simulate(found, costs)
    assert timeline.peak_bytes(sizes) == peaks(found.ranks, sizes)


@examples(5)
@given(p=st.integers(1, 4), m=st.integers(1, 8), data=st.data())
def test_the_bound_holds_for_every_fixed_family(p, m, data):
    name = data.draw(st.sampled_from(sorted(PLACEMENTS)))
    objective = data.draw(st.sampled_from(["makespan", "stage"]))
    placement = PLACEMENTS[name](p)
    costs = data.draw(costs_for(len(placement)))
    problem = OrderingProblem(
        placement, m, costs, whole_ranks(placement), (float(m),) * p, objective
    )
    for schedule in fixed_families(placement, p, m):
        assert value(schedule, costs, objective) >= problem.least * (1 - 1e-9)


def test_within_three_percent_of_the_optimum_on_average():
    gaps = gaps_to_the_optimum(15 * TIMES)
    mean = sum(gap for gap, *_ in gaps) / len(gaps)
    print(f"zb-auto against optimal: mean gap {mean:.2%}, worst {gaps[0]}")
    assert gaps[-1][0] > -1e-6
    assert mean < 0.03


def test_infinity_is_no_limit():
    for name in ("zb-auto", "optimal"):
        options = {"num_ranks": 2, "num_microbatches": 4, "objective": "stage"}
        free = schedules.build(name, **options, activation_limit=float("inf"))
        enough = schedules.build(name, **options, activation_limit=[4, float("inf")])
        assert simulate(free).stage_bubble == simulate(enough).stage_bubble == 0


def test_it_is_the_same_every_time():
    options = {"num_ranks": 3, "num_microbatches": 6, "costs": Costs([1, 2, 1.5], hop=0.2)}
    assert schedules.build("zb-auto", **options) == schedules.build("zb-auto", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation_limit": 0.9}, r"the limit of rank 0 is 0\.9, .* holds 1 there; allow"),
        ({"activation_limit": [2, 0.5]}, "the limit of rank 1 is 0.5"),
        ({"activation_limit": [2]}, "activation_limit has 1 numbers for 2 ranks"),
        ({"placement": "w"}, "placement is 'w'; take 'straight', 'v'"),
        ({"placement": (0, 0)}, "rank 1 has no stage"),
        ({"placement": (0, 1, 2)}, "there is no rank 2"),
        ({"objective": "speed"}, "objective is 'speed'; use makespan or stage"),
        ({"sizes": Sizes([1.0, 1.0])}, "no activation_limit in their unit"),
        ({"sizes": Sizes([1.0]), "activation_limit": 2}, "1 numbers, but the schedule has 2"),
        ({"costs": Costs([1, 2, 3])}, "forward has 3 numbers"),
        ({"effort": -1}, "effort is -1"),
        ({"effort": float("inf")}, "effort is inf, but must be ≥ 0 and finite"),
        ({"effort": "1"}, "effort is '1', but must be a number"),
        ({"activation_limit": float("nan")}, "activation_limit is nan"),
        ({"activation_limit": [2, None]}, "activation_limit is None"),
        ({"activation_limit": {}}, "give one number, or one per rank"),
        ({"placement": [0.0, 1.0]}, "placement is"),
        ({"placement": 5}, "placement is 5"),
        ({"costs": {}}, "costs is of type dict; give a penstock.Costs"),
        ({"costs": 1}, "costs is of type int"),
        ({"sizes": [1, 1], "activation_limit": 2}, "sizes is of type list; give a penstock.Sizes"),
    ],
)
def test_what_it_refuses(options, message):
    with pytest.raises(InputError, match=message):
        schedules.build("zb-auto", num_ranks=2, num_microbatches=4, **options)


@pytest.mark.parametrize(
    ("costs", "kept", "num_microbatches", "authors"),
    [
        ((10.0, 9.9, 7.5, 0.35), 32 / 74, 96, 0.0036),
        more((10.0, 9.9, 7.5, 0.35), 32 / 74, 128, 0.0027),
        ((18.5, 18.1, 9.3, 0.6), 0.5, 128, 0.0031),
    ],
)
def test_on_many_ranks_no_worse_than_the_authors_of_zero_bubble(
    costs, kept, num_microbatches, authors
):
    """What their own search gives (sail-sg/zero-bubble-pipeline-parallelism, ``zb.py``) with twice
    1F1B's memory, for p = 32: the stage bubble."""
    schedule = schedules.build(
        "zb-auto", num_ranks=32, num_microbatches=num_microbatches, costs=Costs(*costs),
        sizes=Sizes([1.0] * 32, [kept] * 32), activation_limit=64, objective="stage", effort=0,
    )  # fmt: skip
    assert round(simulate(schedule, Costs(*costs)).stage_bubble, 4) <= authors
