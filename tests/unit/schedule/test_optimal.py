"""The exact search against one that tries every order, and against every fixed family."""

import builtins
import os
from itertools import pairwise, product

import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st

from penstock import Costs, Kind, Op, Schedule, check, schedules, simulate
from penstock.base.errors import InputError, ScheduleError
from penstock.core.schedule.durations import snake
from penstock.core.schedule.families.searched import optimal
from penstock.core.schedule.search import exact as search
from tests.kit.examples import examples

FIXED = [name for name in schedules.names() if name not in schedules.SEARCHED]
F, I, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741
COSTS = [
    Costs(),
    Costs((1.3, 0.7, 2.0, 1.1), (2.1, 1.0, 0.4, 0.8), 0.6, hop=0.3),
    Costs((3.0, 1.0, 0.5, 1.4), 1.7, (0.2, 1.9, 2.5, 1.0)),
    Costs((1.0, 0.0, 2.0, 0.0), backward_weight=0.0, hop=1.0),
]


def costs_of(costs: Costs, num_stages: int) -> Costs:
    """The costs of the first stages."""

    def cut(value):
        return value[:num_stages] if isinstance(value, tuple) else value

    fields = ("forward", "backward_input", "backward_weight", "hop")
    return Costs(**{field: cut(getattr(costs, field)) for field in fields})


def spans(timeline):
    return [row.ends[-1] - row.starts[0] for row in timeline.rows]


def value(schedule, costs, objective="makespan"):
    timeline = simulate(schedule, costs)
    return timeline.makespan if objective == "makespan" else max(spans(timeline))


def merges(chains):
    """Every order of the items of some chains that keeps each chain's own."""
    if not any(chains):
        yield ()
    for index, chain in enumerate(chains):
        if chain:
            for rest in merges([*chains[:index], chain[1:], *chains[index + 1 :]]):
                yield (chain[0], *rest)


def most_held(ops):
    held, most = 0, 0
    for op in ops:
        held += (op.kind is F) - (op.kind is W)
        most = max(most, held)
    return most


def ends_of(orders, place, costs):
    """(first start, last end) of each rank; ``None`` for a deadlock. Not penstock's simulator."""
    rows = [list(order) for order in orders]
    end, free, first = {}, [0.0] * len(rows), [None] * len(rows)
    while any(rows):
        before = len(end)
        for rank, row in enumerate(rows):
            while row:
                stage, kind, k, _ = op = row[0]
                needs = [(stage, F, k)] if kind is I else [(stage, I, k)] if kind is W else []
                if kind is not W:
                    ahead = stage + 1 if kind is I else stage - 1
                    needs += [(ahead, kind, k)] if 0 <= ahead < len(place) else []
                if any(need not in end for need in needs):
                    break
                hops = (costs.hop if place[need[0]] != rank else 0.0 for need in needs)
                came = [end[need] + hop for need, hop in zip(needs, hops, strict=True)]
                start = max([free[rank], *came])
                first[rank] = start if first[rank] is None else first[rank]
                end[stage, kind, k] = free[rank] = start + costs.duration(op)
                row.pop(0)
        if len(end) == before:
            return None
    return list(zip(first, free, strict=True))


def best_of_all(place, num_microbatches, costs, limit):
    """The least makespan and the least stage span of all orders whatever, one by one."""
    ranks = []
    for rank in range(max(place) + 1):
        mine = [stage for stage, where in enumerate(place) if where == rank]
        chains = [
            tuple(Op(stage, kind, k) for kind in (F, I, W))
            for stage in mine
            for k in range(num_microbatches)
        ]
        ranks.append([ops for ops in merges(chains) if most_held(ops) <= limit * len(mine)])
    found = [ends for orders in product(*ranks) if (ends := ends_of(orders, place, costs))]
    return {
        "makespan": min(max(end for _, end in ends) for ends in found),
        "stage": min(max(end - start for start, end in ends) for ends in found),
    }


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(
    ("place", "num_microbatches", "limit"),
    [
        ((0, 1), 2, 2), ((0, 1), 2, 1), ((0,), 3, 2), ((0, 1, 2), 2, 2), ((0, 1, 2), 2, 1.5),
        ((0, 1, 1, 0), 1, 1), ((0, 0), 1, 1),
    ],
)  # fmt: skip
def test_no_order_at_all_is_better(place, num_microbatches, limit, costs):
    costs = costs_of(costs, len(place))
    least = best_of_all(place, num_microbatches, costs, limit)
    for objective, expected in least.items():
        found = optimal(
            max(place) + 1, num_microbatches, costs=costs, placement=place,
            activation_limit=limit, objective=objective,
        )  # fmt: skip
        assert value(found, costs, objective) == pytest.approx(expected, rel=3e-6)


durations = st.floats(0.1, 3.0).map(lambda number: round(number, 2))


@examples(6)
@given(
    st.sampled_from([(2, 2), (2, 4), (4, 2), (3, 2), (1, 8)]),
    st.sampled_from(["straight", "snake"]),
    st.lists(durations, min_size=24, max_size=24),
    st.sampled_from([0.0, 0.4]),
)
def test_never_worse_than_a_fixed_family(counts, shape, numbers, hop):
    p, m = counts
    place = tuple(range(p)) if shape == "straight" else snake(p, 2)
    per_kind = [numbers[kind * 8 : kind * 8 + len(place)] for kind in range(3)]
    costs = Costs(*per_kind, hop=hop)
    compared = set()
    for objective in ("makespan", "stage"):
        best = optimal(p, m, costs=costs, placement=place, objective=objective)
        least = value(best, costs, objective)
        for name in FIXED:
            try:
                fixed = schedules.build(name, num_ranks=p, num_microbatches=m)
            except InputError:
                continue
            if (
                len(place) == fixed.num_stages
                and fixed.num_slices == 1
                and all(place[op.stage] == r for op, r in fixed.where.items())
            ):
                compared.add(name)
                assert least <= value(fixed, costs, objective) * (1 + 3e-6), name
    assert compared >= ({"gpipe", "1f1b", "zb-h1"} if shape == "straight" else {"zb-v", "v-half"})


@pytest.mark.parametrize(("place", "count"), [((0, 1, 2), 3), (snake(3, 2), 2)])
def test_memory_keeps_to_the_limit_of_each_rank(place, count):
    costs = Costs(backward_weight=0.5, hop=0.2)
    limits = (1.5, 2, 1)
    schedule = optimal(3, count, costs=costs, placement=place, activation_limit=limits)
    held = simulate(schedule, costs).peak_activations
    assert all(has <= may for has, may in zip(held, limits, strict=True))
    check(schedule)
    free = optimal(3, count, costs=costs, placement=place)
    assert value(free, costs) < value(schedule, costs)


def test_more_memory_never_hurts_and_stage_counts_what_it_says():
    costs = Costs(forward=(1, 2, 1, 1.5), backward_weight=1.2, hop=0.3)
    found = [optimal(4, 4, costs=costs, activation_limit=limit) for limit in (1, 2, 3, 4, None)]
    times = [value(schedule, costs) for schedule in found]
    assert all(a >= b - 1e-5 for a, b in pairwise(times)) and times[0] > times[-1]
    by_stage = optimal(4, 4, costs=costs, objective="stage")
    assert value(by_stage, costs, "stage") <= value(found[-1], costs, "stage") + 1e-5


def test_nothing_takes_any_time():
    check(optimal(2, 2, costs=Costs(0, 0, 0)))


def test_a_placement_has_a_name():
    assert optimal(2, 2, placement="v") == optimal(2, 2, placement=snake(2, 2))


@pytest.mark.parametrize(
    ("counts", "options", "message"),
    [
        ((2, 9), {}, "2 ranks × 9 microbatches are 18, but .* 16 at most; take zb-auto"),
        ((2, 2), {"activation_limit": 0.5}, "activation_limit is 0.5, but one microbatch needs 1"),
        ((2, 2), {"activation_limit": [2, 0]}, "one microbatch needs 1 on every rank"),
        ((2, 2), {"activation_limit": [2]}, "has 1 numbers for 2 ranks"),
        ((2, 2), {"activation_limit": float("nan")}, "is nan, but must be ≥ 0"),
        ((2, 2), {"placement": [0, 0]}, "rank 1 has no stage"),
        ((2, 2), {"placement": [0, 0, 1], "objective": "stage"}, "loops and snakes only"),
        ((2, 2), {"objective": "speed"}, "use makespan or stage"),
        ((2, 2), {"time_limit_seconds": -1}, "must be ≥ 0"),
    ],
)
def test_what_it_refuses(counts, options, message):
    with pytest.raises(InputError, match=message):
        optimal(*counts, **options)


def test_microbatches_that_differ_are_refused():
    class Growing(Costs):
        def duration(self, op):
            return 1.0 + op.microbatch

    with pytest.raises(InputError, match=r"0F takes .* one finite duration"):
        optimal(2, 2, costs=Growing())


def test_without_proof_in_time_there_is_no_schedule():
    costs = Costs(
        [1.3, 0.8, 1.9, 1.0, 0.6, 1.7, 1.2, 0.9], [0.7, 1.8, 1.1, 1.4, 0.9, 1.6, 0.5, 1.2]
    )
    with pytest.raises(InputError, match=r"not proven within 0\.01 s .* none is below"):
        optimal(
            4, 4, costs=costs, placement=snake(4, 2), activation_limit=2, time_limit_seconds=0.01
        )


def test_an_answer_that_does_not_stand_up_to_a_recount_is_refused(monkeypatch):
    costs = Costs(forward=(1.3, 0.7, 2.0), backward_input=(2.1, 1.0, 0.4), hop=0.3)
    counted = search.objective_of
    monkeypatch.setattr(search, "objective_of", lambda *given: counted(*given) * 1.1)
    with pytest.raises(ScheduleError, match="the solver promised"):
        optimal(3, 3, costs=costs)


def test_without_scipy_the_extra_is_named(monkeypatch):
    imported = builtins.__import__

    def without_scipy(name, *rest):
        if name.startswith("scipy"):
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_scipy)
    with pytest.raises(InputError, match=r"pip install 'penstock\[search\]'"):
        optimal(2, 2)


def test_what_the_solver_prints_past_python_spoils_no_output(monkeypatch, capfd):
    solve, counted = scipy.optimize.milp, search.objective_of
    called = []

    def prints(*given, **options):
        called.append(os.write(1, b"a line of the solver's own"))
        return solve(*given, **options)

    monkeypatch.setattr(scipy.optimize, "milp", prints)
    # What is known seems worse than it is, so that the solver is asked.
    monkeypatch.setattr(search, "objective_of", lambda *given: counted(*given) * 1.1)
    with pytest.raises(ScheduleError, match="the solver promised"):
        optimal(3, 3, costs=Costs((1.3, 0.7, 2.0), (2.1, 1.0, 0.4), hop=0.3))
    os.write(1, b"heard again")
    assert called
    assert capfd.readouterr().out == "heard again"


def test_it_is_built_by_name_and_is_the_same_every_time():
    built = schedules.build("optimal", num_ranks=2, num_microbatches=3)
    assert built == optimal(2, 3) == Schedule.parse(str(built))
    assert "optimal" in schedules.SEARCHED
