"""PipeDream: 1F1B that never flushes. Every microbatch is an update; weights are some updates old.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
sections 3.2 and 3.3; first as Harlap et al., "PipeDream: Fast and Efficient Pipeline Parallel DNN
Training", arXiv 1806.03377.
"""

from __future__ import annotations

from penstock.core.schedule.families.alternate import alternate
from penstock.core.schedule.families.replicated import Replicas, replica_counts, round_robin
from penstock.core.schedule.schedule import Schedule


def pipedream(num_ranks: int, num_microbatches: int, replicas: Replicas = "") -> Schedule:
    """No bubble but at the very beginning and end of a stream: 1 in throughput, against m/(m+p−1)
    with a flush per m microbatches; min(p−s, m) activations and weight versions at stage s.

    ``num_microbatches`` is the length of the stream, which may be any; the warm-up comes once, then
    one forward and one backward take turns, and the end drains. A stage updates after each backward
    (1F1B-RR: after one backward of each of its replicas), so that a gradient is p−1−s updates old
    when it is applied at stage s. Which weights passes read is a policy's affair
    (``penstock.versions``): weight stashing unless something else is said.

    Wins: When m is small: at p = 4 and m = 4, 1F1B reaches 57 % of four devices. And when stages
    need replicas because no cut balances them.

    Loses: When delay harms: weights are stale, more so the deeper the pipeline; learning rates must
    come down or be corrected. It is not what one device computes.

    Args:
        num_microbatches: length of the stream.
        replicas: of each stage, as in ``2-1-1``, which is 4 ranks; one of each by default.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(pipedream(3, 6), Costs())))
    pipedream, predicted: makespan 24, bubble 25.0%, stage bubble 25.0%
    rank 0 │F0F1F2········B0──F3B1──F4B2──F5B3──··B4──··B5──│ peak 3
    rank 1 │··F0F1····B0──F2B1──F3B2──F4B3──F5B4──··B5──····│ peak 2
    rank 2 │····F0B0──F1B1──F2B2──F3B3──F4B4──F5B5──········│ peak 1

    Raises:
        InputError: replicas that do not add up to the ranks, or more replicas than microbatches.
    """
    counts = replica_counts("pipedream", replicas, num_ranks)
    return round_robin("pipedream", counts, num_microbatches, alternate)
