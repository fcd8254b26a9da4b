"""ZB-auto: search for the order, instead of fixing it, for the costs and the memory at hand.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv 2401.10241, section 3 (their ZB-1p
and ZB-2p are such orders under limits of p and 2p); made general here: any costs per stage and
link, any limit per rank, several stages per rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.base.errors import InputError
from penstock.base.values import expect, number
from penstock.core.schedule.durations import Durations, UnitDurations
from penstock.core.schedule.families.breadth_first import breadth_first
from penstock.core.schedule.families.dualpipe_v import dualpipe_v
from penstock.core.schedule.families.eager_one_f_one_b import eager_one_f_one_b
from penstock.core.schedule.families.gpipe import gpipe
from penstock.core.schedule.families.hanayo import hanayo
from penstock.core.schedule.families.interleaved import interleaved
from penstock.core.schedule.families.interleaved_zb import interleaved_zb
from penstock.core.schedule.families.one_f_one_b import one_f_one_b
from penstock.core.schedule.families.options import one_per_rank, placed
from penstock.core.schedule.families.v_half import v_half
from penstock.core.schedule.families.v_min import v_min
from penstock.core.schedule.families.zb_h1 import zb_h1
from penstock.core.schedule.families.zb_h2 import zb_h2
from penstock.core.schedule.families.zb_v import zb_v
from penstock.core.schedule.lower import split_backward
from penstock.core.schedule.memory import Sizes
from penstock.core.schedule.placement import loop, snake
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
    """The best order found for given costs under a given limit of memory; never worse than any
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
