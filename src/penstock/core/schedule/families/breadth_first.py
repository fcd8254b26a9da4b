"""Breadth-first: several short stages per rank, and all microbatches of one before the next.

Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023, arXiv 2211.05953, section 4.
"""

from __future__ import annotations

from penstock.core.schedule.families.alternate import Line, alternate
from penstock.core.schedule.families.layout import laid_out
from penstock.core.schedule.families.options import at_least
from penstock.core.schedule.op import Kind
from penstock.core.schedule.schedule import Schedule


def breadth_first(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """GPipe's bubble divided by v, the stages per rank: idle (p−1)T/v for m ≥ p; every rank holds
    all m microbatches.

    Stage lap·p + s is on rank s. A stage's weights are used in one go, forward and backward, so
    with sharded weights each stage is gathered and reduced once per pass. Microbatches are back at
    the first rank long before that begins its second stage: a channel must hold ⌊m/p⌋ messages.

    Wins: When weights are sharded among data-parallel ranks, since each stage is gathered once per
    pass, and when hops are slow: with hops of F/2, p = 8 and m = 32 the bubble is 15 %, and
    interleaved 1F1B's is 21 %.

    Loses: When memory is short: all m microbatches are held, 32 where interleaved 1F1B holds 11.5.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(breadth_first(2, 2), Costs())))
    breadth-first, predicted: makespan 15, bubble 20.0%, stage bubble 20.0%
    rank 0 │0F0─0F1─2F0─2F1─············2B0─────2B1─────0B0─────0B1─────│ peak 2
    rank 1 │····1F0─1F1─3F0─3F1─3B0─────3B1─────1B0─────1B1─────········│ peak 2

    Args:
        stages_per_rank: v; with 1, this is GPipe.

    Raises:
        InputError: ``stages_per_rank`` is not a whole number ≥ 1.
    """
    at_least("breadth-first", "stages_per_rank", stages_per_rank, 1)
    p, v = num_ranks, stages_per_rank
    laps = [lap for lap in range(v) for _ in range(num_microbatches)]
    microbatches = [*range(num_microbatches)] * v
    ranks = (
        alternate(
            len(laps),
            Line(Kind.FORWARD, microbatches, rank, laps, p),
            Line(Kind.BACKWARD, microbatches, (v - 1) * p + rank, laps, -p),
        )
        for rank in range(p)
    )
    return laid_out(ranks, "breadth-first")
