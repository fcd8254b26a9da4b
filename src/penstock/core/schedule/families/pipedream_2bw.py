"""PipeDream-2BW: 1F1B that never flushes, one update per minibatch, two weight versions everywhere.

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, arXiv 2006.09503,
section 3.1.
"""

from __future__ import annotations

from penstock.base.errors import InputError
from penstock.core.schedule.families.alternate import alternate
from penstock.core.schedule.families.options import at_least
from penstock.core.schedule.families.replicated import Replicas, replica_counts, round_robin
from penstock.core.schedule.rounds import fewest_per_update
from penstock.core.schedule.schedule import Schedule


def pipedream_2bw(
    num_ranks: int, num_microbatches: int, minibatch: int | None = None, replicas: Replicas = ""
) -> Schedule:
    """PipeDream's order and throughput with two weight versions instead of p−s: gradients of a
    minibatch are summed, and every stage is exactly one update late.

    W(t+1) = W(t) − ν∇f(W(t−1)): microbatches of minibatch t read version max(t−1, 0) at every
    stage, forward and backward.

    Wins: When there is no memory for p versions of the weights, and when a delay that is the same
    everywhere, and 1, is what training bears.

    Loses: When weights are large: there are two of them. A minibatch must have at least p−1
    microbatches; where m is much larger than p, 1F1B's bubble is small and needs no second version.

    Args:
        num_microbatches: length of the stream, any.
        minibatch: microbatches per update; p by default.
        replicas: of each stage, as in ``2-1-1``, which is 4 ranks; one of each by default.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(pipedream_2bw(3, 6), Costs())))
    pipedream-2bw, predicted: makespan 24, bubble 25.0%, stage bubble 25.0%
    rank 0 │F0F1F2········B0──F3B1──F4B2──F5B3──··B4──··B5──│ peak 3
    rank 1 │··F0F1····B0──F2B1──F3B2──F4B3──F5B4──··B5──····│ peak 2
    rank 2 │····F0B0──F1B1──F2B2──F3B3──F4B4──F5B5──········│ peak 1

    Raises:
        InputError: a minibatch is too short for two versions, replicas that do not add up to the
            ranks, or more replicas than microbatches.
    """
    family = "pipedream-2bw"
    counts = replica_counts(family, replicas, num_ranks)
    if minibatch is not None:
        at_least(family, "minibatch", minibatch, 1)
        least = fewest_per_update(counts)
        if minibatch < least:
            raise InputError(
                f"{family}: a minibatch of {minibatch} microbatches is too short: a stage would "
                f"need more than two versions; take {least} or more"
            )
    return round_robin(family, counts, num_microbatches, alternate)
