"""1F1B: one forward, one backward, with as few activations in flight as keep the pipe full.

Published as PipeDream-Flush (Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training",
ICML 2021, arXiv 2006.09503, section 3.3) and as DAPPLE's early backward scheduling (Fan et al.,
"DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", PPoPP 2021, arXiv
2007.01045, section 3.2).
"""

from __future__ import annotations

from penstock.core.schedule.families.alternate import alternate
from penstock.core.schedule.families.replicated import Replicas, replica_counts, round_robin
from penstock.core.schedule.schedule import Schedule


def one_f_one_b(num_ranks: int, num_microbatches: int, replicas: Replicas = "") -> Schedule:
    """One forward, one backward: GPipe's bubble with the memory of min(p−s, m) microbatches.

    Rank s first runs p−1−s forwards (warm-up), then alternates (steady), then drains (cool-down).

    Wins: As the first choice: at most p microbatches in memory whatever m is, one message per stage
    and microbatch each way, weights once, backward in one piece. From m = 8p on, less than 12 % is
    left to win.

    Loses: When microbatches are few: the bubble is 27 % at p = 4 and m = 8, and ZB-H1's is 11 %
    with the same memory and messages. Slow hops hurt too, since each rank waits out a hop there and
    back.

    Args:
        replicas: of each stage, as in ``2-1-1``, which is 4 ranks; one of each by default.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(one_f_one_b(3, 4), Costs())))
    1f1b, predicted: makespan 18, bubble 33.3%, stage bubble 33.3%
    rank 0 │F0F1F2········B0──F3B1──··B2──··B3──│ peak 3
    rank 1 │··F0F1····B0──F2B1──F3B2──··B3──····│ peak 2
    rank 2 │····F0B0──F1B1──F2B2──F3B3──········│ peak 1

    Raises:
        InputError: replicas that do not add up to the ranks, or more replicas than microbatches.
    """
    counts = replica_counts("1f1b", replicas, num_ranks)
    return round_robin("1f1b", counts, num_microbatches, alternate)
