"""GPipe: all forwards, then all backwards.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
NeurIPS 2019, arXiv 1811.06965, section 2.
"""

from __future__ import annotations

from penstock.core.schedule.families.alternate import Line, Turns, alternate
from penstock.core.schedule.families.replicated import Replicas, replica_counts, round_robin
from penstock.core.schedule.schedule import Schedule


def gpipe(num_ranks: int, num_microbatches: int, replicas: Replicas = "") -> Schedule:
    """All forwards, then all backwards: the simplest, and the hungriest for memory.

    Bubble (p−1)/(m+p−1); every rank holds the activations of all m microbatches. Backwards run in
    the order of the forwards, so that gradients accumulate in the same order as on one device.

    Wins: When activations are no concern, because m ≤ p or because they are recomputed: nothing is
    simpler, and no hop stands between a rank's microbatches. Hops of F/10 cost it 1 % at p = 8 and
    m = 32, and 1F1B 5 %.

    Loses: When m is large: 1F1B has the same bubble with 8 microbatches in memory instead of 32 at
    p = 8 and m = 32.

    Args:
        replicas: of each stage, as in ``2-1-1``, which is 4 ranks; one of each by default.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(gpipe(3, 4), Costs())))
    gpipe, predicted: makespan 18, bubble 33.3%, stage bubble 33.3%
    rank 0 │F0F1F2F3············B0──B1──B2──B3──│ peak 4
    rank 1 │··F0F1F2F3······B0──B1──B2──B3──····│ peak 4
    rank 2 │····F0F1F2F3B0──B1──B2──B3──········│ peak 4

    Raises:
        InputError: replicas that do not add up to the ranks, or more replicas than microbatches.
    """
    counts = replica_counts("gpipe", replicas, num_ranks)
    return round_robin("gpipe", counts, num_microbatches, _all_then_all)


def _all_then_all(in_hand: int, forwards: Line, backwards: Line) -> Turns:
    return alternate(len(forwards), forwards, backwards)
