"""Eager 1F1B: early backwards as in 1F1B, but two forwards ahead per stage that follows.

Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", PPoPP 2021,
arXiv 2007.01045, section 3.2, the policy with K = min(2(S−i)−1, D).
"""

from __future__ import annotations

from penstock.core.schedule.families.alternate import alternate, in_order
from penstock.core.schedule.families.layout import laid_out
from penstock.core.schedule.op import Kind
from penstock.core.schedule.schedule import Schedule


def eager_one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B that hides hops up to half a beat c ≤ (F+B)/2, for min(2(p−s)−1, m) microbatches of
    memory: makespan (m+p−1)(F+B) + 2(p−1)c.

    A forward and its gradient cross to the next rank and back. The second microbatch in hand keeps
    a rank busy meanwhile; 1F1B waits. Without hops it gains nothing over 1F1B.

    Wins: When hops are slow and memory is not: with hops of F/2, p = 8 and m = 32 the bubble is 23
    %, and 1F1B's is 36 %.

    Loses: When hops are fast: it holds 15 microbatches where 1F1B holds 8 at p = 8, for the same
    bubble.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(eager_one_f_one_b(3, 4), Costs(hop=1))))
    eager-1f1b, predicted: makespan 22, bubble 45.5%, stage bubble 45.5%
    rank 0 │F0F1F2F3··············B0──··B1──··B2──··B3──│ peak 4
    rank 1 │····F0F1F2······B0──F3B1──··B2──··B3──······│ peak 3
    rank 2 │········F0B0──F1B1──F2B2──F3B3──············│ peak 1
    """
    ranks = (
        alternate(
            2 * (num_ranks - 1 - rank),
            in_order(rank, Kind.FORWARD, num_microbatches),
            in_order(rank, Kind.BACKWARD, num_microbatches),
        )
        for rank in range(num_ranks)
    )
    return laid_out(ranks, "eager-1f1b")
