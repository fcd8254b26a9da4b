"""Streams without a flush: PipeDream, PipeDream-2BW, PARTIME."""

from __future__ import annotations

from penstock.base.errors import InputError
from penstock.core.schedule.families.layout import alternate, in_order, laid_out
from penstock.core.schedule.families.options import Replicas, at_least, replica_counts, round_robin
from penstock.core.schedule.op import Kind
from penstock.core.schedule.rounds import fewest_per_update
from penstock.core.schedule.schedule import Schedule


def pipedream(num_ranks: int, num_microbatches: int, replicas: Replicas = "") -> Schedule:
    """PipeDream: 1F1B that never flushes. Every microbatch is an update; weights are some
    updates old.

    No bubble but at the very beginning and end of a stream: 1 in throughput, against m/(m+p−1)
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

    Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP
    2019, sections 3.2 and 3.3; first as Harlap et al., "PipeDream: Fast and Efficient Pipeline
    Parallel DNN Training", arXiv 1806.03377.

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


def pipedream_2bw(
    num_ranks: int, num_microbatches: int, minibatch: int | None = None, replicas: Replicas = ""
) -> Schedule:
    """PipeDream-2BW: 1F1B that never flushes, one update per minibatch, two weight versions
    everywhere.

    PipeDream's order and throughput with two weight versions instead of p−s: gradients of a
    minibatch are summed, and every stage is exactly one update late.

    W(t+1) = W(t) − ν∇f(W(t−1)): microbatches of minibatch t read version max(t−1, 0) at every
    stage, forward and backward.

    Wins: When there is no memory for p versions of the weights, and when a delay that is the same
    everywhere, and 1, is what training bears.

    Loses: When weights are large: there are two of them. A minibatch must have at least p−1
    microbatches; where m is much larger than p, 1F1B's bubble is small and needs no second version.

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, arXiv
    2006.09503, section 3.1.

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


def partime(num_ranks: int, num_microbatches: int) -> Schedule:
    """PARTIME: every frame of a live stream trains the model; its gradient goes through newer
    frames.

    No bubble in a stream that goes on, one version of the weights and one frame's activations
    everywhere: a frame every max(T_s, (p·T_s + 2(p−1)c)/(2p−1)) with T_s = F + B, so that hops c up
    to T_s/2 are free.

    A microbatch is a frame. Backwards bear the number of the frame whose loss they come from; they
    go through what the newest forward of their stage has left, which is 2(p−1−s) frames younger.
    The order is that of eager 1F1B without an end: what is on its way to a stage when the stream
    ends finds no frame to go through and is dropped. Each backward is an update.

    Wins: On streams that change little from frame to frame and come too fast for one device: p
    devices take p times the frames, each with the memory of its own layers only.

    Loses: Wherever frames have little to do with each other, as in shuffled data or at cuts: a
    gradient then goes through a frame that it knows nothing of. And for latency: a frame still
    passes through all stages, up to p ticks at full load.

    Source: Meloni et al., "PARTIME: Scalable and Parallel Processing Over Time with Deep Neural
    Networks", arXiv 2210.09147; the recurrence is that of Malinowski et al., "Sideways:
    Depth-Parallel Training of Video Models", CVPR 2020, arXiv 2001.06232.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(partime(3, 17), Costs(), arrivals=1 / 3).steady(5)))
    partime, predicted: makespan 16, bubble 6.2%, stage bubble 0.0%
    rank 0 │F6─B2────F7─B3────F8─B4────F9─B5────F10B6────···│ peak 1
    rank 1 │···F6─B4────F7─B5────F8─B6────F9─B7────F10B8────│ peak 1
    rank 2 │B5────F6─B6────F7─B7────F8─B8────F9─B9────F10···│ peak 1
    """
    ranks = (
        alternate(
            2 * (num_ranks - 1 - rank),
            in_order(rank, Kind.FORWARD, num_microbatches),
            in_order(rank, Kind.BACKWARD, num_microbatches),
        )
        for rank in range(num_ranks)
    )
    return laid_out(ranks, "partime", activations="newest")
