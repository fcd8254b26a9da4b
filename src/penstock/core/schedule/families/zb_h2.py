"""ZB-H2: ZB-H1 with twice the microbatches in flight, so that no rank waits once it has begun.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv 2401.10241, section 2.2.
"""

from __future__ import annotations

from penstock.core.schedule.families.alternate import alternate_split
from penstock.core.schedule.families.layout import laid_out
from penstock.core.schedule.schedule import Schedule


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """No bubble inside a rank's own work: idle (p−1)·max(0, F+I−2W) from its first op to its last,
    for W ≤ F and m ≥ 2p−1; every rank holds min(2p−1, m) microbatches.

    Rank s begins s forwards late and ends as late. That gains only where ranks need not wait for
    each other between steps; a flush makes the bubble ZB-H1's if F = I = W. Hops of c ≤ W/2 stretch
    a rank's work by 2(p−1)c.

    Wins: When the update does not synchronise the ranks (post-validation) and W is about as long as
    F and I: the stage bubble is 0. Its many microbatches in flight also hide slow hops: with hops
    of F/2, p = 8 and m = 32 the bubble of a flushed step is 10 %, and ZB-H1's is 18 %.

    Loses: When every step ends in a flush, hops are fast and F = I = W: it takes as long as ZB-H1
    with 15 microbatches in memory instead of 8 at p = 8. With m = p it takes longer.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(zb_h2(3, 5), Costs())))
    zb-h2, predicted: makespan 17, bubble 11.8%, stage bubble 0.0%
    rank 0 │F0F1F2F3F4I0W0I1W1I2W2I3W3I4W4····│ peak 5
    rank 1 │··F0F1F2I0F3I1F4I2W0I3W1I4W2W3W4··│ peak 5
    rank 2 │····F0I0F1I1F2I2F3I3F4I4W0W1W2W3W4│ peak 5
    """
    ranks = (
        alternate_split(rank, num_microbatches, warm_up=2 * (num_ranks - 1 - rank), delay=2 * rank)
        for rank in range(num_ranks)
    )
    return laid_out(ranks, "zb-h2")
