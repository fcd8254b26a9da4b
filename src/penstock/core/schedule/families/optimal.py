"""Optimal: the order of F, I and W that ends first, proven; for small pipelines.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv 2401.10241, whose appendix writes
such a search as an integer program; ``penstock.core.schedule.optimal`` says how ours is solved.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.base.errors import InputError
from penstock.base.values import expect, number
from penstock.core.schedule.check import check
from penstock.core.schedule.durations import Durations, UnitDurations
from penstock.core.schedule.families.options import one_per_rank, placed
from penstock.core.schedule.families.zb_auto import zb_auto
from penstock.core.schedule.lower import split_backward
from penstock.core.schedule.op import Kind, Op
from penstock.core.schedule.placement import Placement
from penstock.core.schedule.schedule import Schedule
from penstock.core.schedule.search import Objective, check_objective

LARGEST = 16
"""The most ranks times microbatches that it takes."""
_SPLIT = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def optimal(
    num_ranks: int,
    num_microbatches: int,
    *,
    costs: Durations | None = None,
    activation_limit: float | Sequence[float] | None = None,
    placement: str | Sequence[int] = "straight",
    objective: Objective = "makespan",
    time_limit_seconds: float = 60.0,
) -> Schedule:
    """The least makespan that F, I and W can have under given costs and a given limit of memory,
    to one part in a million; for p·m ≤ 16.

    Wins: As the measure of all others: how far a schedule is from the best under the costs at hand,
    or what one more microbatch in memory could gain.

    Loses: When there is more to order: the search grows beyond all bounds. With several stages per
    rank it may take a minute already at p·m = 16; take zb-auto, which searches without proof.

    Args:
        num_ranks, num_microbatches: p and m; p·m may be 16 at most.
        costs: what ops and hops take; by default F = I = W = 1 and no hop.
        activation_limit: how many microbatches of its layers a rank may hold at once, from the
            start of F to the end of W; one number, or one per rank. Unlimited by default.
        placement: ``"straight"``, ``"v"`` (two stages per rank), or the rank of each stage.
        objective: ``"makespan"``, or ``"stage"`` for the longest time that any rank needs from its
            first op to its last when all ops run as early as they can, which the stage bubble
            counts.
        time_limit_seconds: when to give up.

    Raises:
        InputError: p·m > 16, a limit below one microbatch, no proof in time, costs that differ
            between microbatches, or scipy is not installed.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(optimal(2, 3, activation_limit=2), Costs())))
    optimal, predicted: makespan 10, bubble 10.0%, stage bubble 10.0%
    rank 0 │F0F1··I0W0F2I1W1I2W2│ peak 2
    rank 1 │··F0I0F1I1W0F2I2W1W2│ peak 2
    """
    costs = UnitDurations() if costs is None else costs
    expect(costs, Durations, "optimal: costs", "give a penstock.Costs")
    check_objective("optimal", objective)
    check_size(num_ranks, num_microbatches)
    time_limit_seconds = number("optimal: time_limit_seconds", time_limit_seconds, most=1e6)
    stages = placed("optimal", num_ranks, placement)
    if objective == "stage":
        _check_stage_objective(stages, num_ranks)
    costs.check_stages(len(stages))
    _check_costs(stages, num_microbatches, costs)
    room = _room(num_ranks, num_microbatches, stages, activation_limit)
    # Only here, so that everything else starts without numpy.
    from penstock.core.schedule.optimal import ExactProblem, minimise

    problem = ExactProblem.of(stages, num_microbatches, costs, room, objective == "stage")
    limits = [has / stages.count(rank) for rank, has in enumerate(room)]
    good = zb_auto(
        num_ranks,
        num_microbatches,
        costs=costs,
        activation_limit=limits,
        placement=stages,
        objective=objective,
    )
    number_of = {op: index for index, op in enumerate(problem.ops)}
    known = [[number_of[op] for op in ops] for ops in split_backward(good).ranks]
    order = minimise(problem, known, time_limit_seconds)
    schedule = Schedule.of(([problem.ops[n] for n in numbers] for numbers in order), "optimal")
    check(schedule)
    return schedule


def check_size(num_ranks: int, num_microbatches: int) -> None:
    """Raise ``InputError`` if there are more ops than the exact search takes."""
    if num_ranks * num_microbatches > LARGEST:
        raise InputError(
            f"optimal: {num_ranks} ranks × {num_microbatches} microbatches are "
            f"{num_ranks * num_microbatches}, but the exact search takes {LARGEST} at most; take "
            "zb-auto, which searches without proof"
        )


def _check_stage_objective(stages: Placement, num_ranks: int) -> None:
    if len(set(stages[:num_ranks])) < num_ranks:
        raise InputError(
            f"optimal: with placement {list(stages)}, a rank gets its second stage before another "
            "has its first; the objective 'stage' is defined for loops and snakes only"
        )


def _check_costs(stages: Placement, num_microbatches: int, costs: Durations) -> None:
    """Raise unless all microbatches take equally long: then they may run in order."""
    for stage in range(len(stages)):
        for kind in _SPLIT:
            taken = {costs.duration(Op(stage, kind, k)) for k in range(num_microbatches)}
            if len(taken) > 1 or not all(0 <= seconds < float("inf") for seconds in taken):
                raise InputError(
                    f"optimal: {stage}{kind} takes {sorted(taken)}; give one finite duration ≥ 0 "
                    "for all microbatches"
                )


def _room(
    num_ranks: int,
    num_microbatches: int,
    stages: Placement,
    activation_limit: float | Sequence[float] | None,
) -> tuple[int, ...]:
    """How many forwards each rank may hold; a microbatch has one per stage of the rank."""
    limits: Sequence[float] = [num_microbatches] * num_ranks
    if activation_limit is not None:
        limits = one_per_rank("optimal", "activation_limit", activation_limit, num_ranks)
    if not all(limit >= 1 for limit in limits):
        raise InputError(
            f"optimal: activation_limit is {activation_limit}, but one microbatch needs 1 on every "
            "rank, from its F to its W"
        )
    return tuple(
        # A share of a third adds up to a little less than 1.
        int(min(limit, num_microbatches) * stages.count(rank) + 1e-9)
        for rank, limit in enumerate(limits)
    )
