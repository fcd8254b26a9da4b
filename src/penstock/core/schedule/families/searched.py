"""Orders that are searched for given costs and memory: ZB-auto climbs, ``optimal`` proves."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.base.errors import InputError
from penstock.base.values import expect, number
from penstock.core.schedule.check import check
from penstock.core.schedule.durations import Durations, Placement, UnitDurations, loop, snake
from penstock.core.schedule.families.bidirectional import hanayo
from penstock.core.schedule.families.building_block import v_half, v_min
from penstock.core.schedule.families.looped import breadth_first, interleaved, interleaved_zb
from penstock.core.schedule.families.options import one_per_rank, placed
from penstock.core.schedule.families.straight import eager_one_f_one_b, gpipe, one_f_one_b
from penstock.core.schedule.families.zero_bubble import dualpipe_v, zb_h1, zb_h2, zb_v
from penstock.core.schedule.lower import split_backward
from penstock.core.schedule.memory import Sizes
from penstock.core.schedule.op import Kind, Op
from penstock.core.schedule.schedule import Schedule
from penstock.core.schedule.search import (
    Objective,
    OrderingProblem,
    Orders,
    check_objective,
    search,
    whole_ranks,
)

_STRAIGHT = (gpipe, one_f_one_b, eager_one_f_one_b, zb_h1, zb_h2)
_V = (zb_v, v_half, v_min)
_LOOP = (interleaved, breadth_first, interleaved_zb)


def zb_auto(
    num_ranks: int,
    num_microbatches: int,
    *,
    costs: Durations | None = None,
    activation_limit: float | Sequence[float] | None = None,
    sizes: Sizes | None = None,
    placement: str | Sequence[int] = "straight",
    objective: Objective = "makespan",
    effort: float = 1.0,
) -> Schedule:
    """ZB-auto: search for the order, instead of fixing it, for the costs and the memory at hand.

    The best order found for given costs under a given limit of memory; never worse than any
    fixed family with the same placement that keeps to the limit.

    Starts from those families and from the list scheduler of the zero-bubble papers with many
    settings, then climbs. Deterministic.

    Wins: When stages or links differ from each other, or when memory lies between the needs of the
    fixed families: it begins with those that keep to the limit and only ever improves on them. At F
    = 2I = 2W, p = 8 and m = 32, on a V with at most 4 microbatches, its bubble is 26 %, and V-Min's
    is 37 %.

    Loses: When costs are alike: at F = I = W it finds ZB-H1, or ZB-V on a V, and takes a second or
    two for it. On a straight pipeline with fewer than p microbatches it is no match for a V: with
    at most 5 at p = 8 and m = 32 the bubble is 24 %, and V-Half's is 8 %.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv 2401.10241, section 3
    (their ZB-1p and ZB-2p are such orders under limits of p and 2p); made general here: any costs
    per stage and link, any limit per rank, several stages per rank.

    Args:
        costs: of every stage and link, for example a ``penstock.Costs``; unit costs by default.
        activation_limit: the most a rank may hold, one number or one per rank: in microbatches of
            the rank's layers, or, where ``sizes`` is given, in its unit (bytes). By default p
            microbatches, the memory of 1F1B.
        sizes: what a microbatch keeps at each stage, and which part of it from I until W. By
            default everything until W.
        placement: ``"straight"``, ``"v"`` (two stages per rank), or the rank of each stage.
        objective: ``"makespan"``, or ``"stage"`` for the longest time that any rank needs from its
            first op to its last, which the stage bubble counts.
        effort: how long to search; 2 looks at twice as many orders.

    Raises:
        InputError: the limit does not hold one microbatch, or an argument does not fit the ranks.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(zb_auto(2, 4, activation_limit=3), Costs())))
    zb-auto, predicted: makespan 13, bubble 7.7%, stage bubble 0.0%
    rank 0 │F0F1F2I0W0F3I1W1I2W2I3W3··│ peak 3
    rank 1 │··F0I0F1I1F2I2W0F3I3W1W2W3│ peak 3
    """
    check_objective("zb-auto", objective)
    effort = number("zb-auto: effort", effort, most=1e4)
    costs = UnitDurations() if costs is None else costs
    expect(costs, Durations, "zb-auto: costs", "give a penstock.Costs")
    ranks = placed("zb-auto", num_ranks, placement)
    costs.check_stages(len(ranks))
    if sizes is not None:
        expect(sizes, Sizes, "zb-auto: sizes", "give a penstock.Sizes")
        sizes.check_stages(len(ranks))
        for stage, (whole, part) in enumerate(
            zip(sizes.activation, sizes.kept_for_weight, strict=True)
        ):
            if part > whole:
                raise InputError(
                    f"zb-auto: sizes: stage {stage} keeps {part} for its weight gradient, more "
                    f"than its whole activation of {whole}; a split backward frees no memory there"
                )
    problem = OrderingProblem(
        placement=ranks,
        num_microbatches=num_microbatches,
        durations=costs,
        sizes=sizes or whole_ranks(ranks),
        limits=_limits(num_ranks, activation_limit, sizes),
        objective=objective,
    )
    orders = search(problem, _seeds(problem), effort)
    return problem.schedule(orders, "zb-auto")


def _limits(
    num_ranks: int, limit: float | Sequence[float] | None, sizes: Sizes | None
) -> tuple[float, ...]:
    if limit is None and sizes is not None:
        raise InputError("zb-auto: sizes are given, but no activation_limit in their unit")
    if limit is None:
        return (float(num_ranks),) * num_ranks
    return one_per_rank("zb-auto", "activation_limit", limit, num_ranks)


def _seeds(problem: OrderingProblem) -> list[Orders]:
    """The orders of the fixed families with this placement, as they are and with B split."""
    num_ranks, num_microbatches = problem.num_ranks, problem.num_microbatches
    built = []
    if problem.placement == tuple(range(num_ranks)):
        built += [family(num_ranks, num_microbatches) for family in _STRAIGHT]
    if problem.placement == snake(num_ranks, 2):
        built += [family(num_ranks, num_microbatches) for family in _V]
        if num_microbatches >= 2 * num_ranks:
            built.append(dualpipe_v(num_ranks, num_microbatches))
    waves, rest = divmod(len(problem.placement), 2 * num_ranks)
    snakes = not rest and problem.placement == snake(num_ranks, 2 * waves)
    if snakes and num_microbatches >= num_ranks:
        built.append(hanayo(num_ranks, num_microbatches, waves))
    laps = len(problem.placement) // num_ranks
    if laps > 1 and problem.placement == loop(num_ranks, laps):
        built += [family(num_ranks, num_microbatches, stages_per_rank=laps) for family in _LOOP]
    halves = [split_backward(schedule) for schedule in built]
    built += [split for split, whole in zip(halves, built, strict=True) if split != whole]
    return [problem.orders(schedule) for schedule in built]


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
    """Optimal: the order of F, I and W that ends first, proven; for small pipelines.

    The least makespan that F, I and W can have under given costs and a given limit of memory,
    to one part in a million; for p·m ≤ 16.

    Wins: As the measure of all others: how far a schedule is from the best under the costs at hand,
    or what one more microbatch in memory could gain.

    Loses: When there is more to order: the search grows beyond all bounds. With several stages per
    rank it may take a minute already at p·m = 16; take zb-auto, which searches without proof.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv 2401.10241, whose
    appendix writes such a search as an integer program; ``penstock.core.schedule.search.exact``
    says how ours is solved.

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
    # Only here, since few search exactly.
    from penstock.core.schedule.search.exact import minimise
    from penstock.core.schedule.search.program import ExactProblem

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
