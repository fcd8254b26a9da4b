"""One stage per rank, whole backwards: GPipe, 1F1B and its kin with a flush behind each minibatch,
and PipeDream, PipeDream-2BW and PARTIME, which never flush.
"""

from __future__ import annotations

from penstock.base.errors import InputError
from penstock.core.schedule.families.layout import Line, alternate, in_order, laid_out
from penstock.core.schedule.families.options import Replicas, at_least, replica_counts, round_robin
from penstock.core.schedule.op import Kind
from penstock.core.schedule.rounds import fewest_per_update
from penstock.core.schedule.schedule import Schedule


def gpipe(num_ranks: int, num_microbatches: int, replicas: Replicas = "") -> Schedule:
    """GPipe: all forwards, then all backwards.

    All forwards, then all backwards: the simplest, and the hungriest for memory.

    Bubble (p−1)/(m+p−1); every rank holds the activations of all m microbatches. Backwards run in
    the order of the forwards, so that gradients accumulate in the same order as on one device.

    Wins: When activations are no concern, because m ≤ p or because they are recomputed: nothing is
    simpler, and no hop stands between a rank's microbatches. Hops of F/10 cost it 1 % at p = 8 and
    m = 32, and 1F1B 5 %.

    Loses: When m is large: 1F1B has the same bubble with 8 microbatches in memory instead of 32 at
    p = 8 and m = 32.

    Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", NeurIPS 2019, arXiv 1811.06965, section 2.

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
    # All forwards, then all backwards.
    return round_robin(
        "gpipe",
        counts,
        num_microbatches,
        lambda _, forwards, backwards: alternate(len(forwards), forwards, backwards),
    )


def one_f_one_b(num_ranks: int, num_microbatches: int, replicas: Replicas = "") -> Schedule:
    """1F1B: one forward, one backward, with as few activations in flight as keep the pipe full.

    One forward, one backward: GPipe's bubble with the memory of min(p−s, m) microbatches.

    Rank s first runs p−1−s forwards (warm-up), then alternates (steady), then drains (cool-down).

    Wins: As the first choice: at most p microbatches in memory whatever m is, one message per stage
    and microbatch each way, weights once, backward in one piece. From m = 8p on, less than 12 % is
    left to win.

    Loses: When microbatches are few: the bubble is 27 % at p = 4 and m = 8, and ZB-H1's is 11 %
    with the same memory and messages. Slow hops hurt too, since each rank waits out a hop there and
    back.

    Source: Published as PipeDream-Flush (Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN
    Training", ICML 2021, arXiv 2006.09503, section 3.3) and as DAPPLE's early backward scheduling
    (Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", PPoPP 2021,
    arXiv 2007.01045, section 3.2).

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


def eager_one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Eager 1F1B: early backwards as in 1F1B, but two forwards ahead per stage that follows.

    1F1B that hides hops up to half a beat c ≤ (F+B)/2, for min(2(p−s)−1, m) microbatches of
    memory: makespan (m+p−1)(F+B) + 2(p−1)c.

    A forward and its gradient cross to the next rank and back. The second microbatch in hand keeps
    a rank busy meanwhile; 1F1B waits. Without hops it gains nothing over 1F1B.

    Wins: When hops are slow and memory is not: with hops of F/2, p = 8 and m = 32 the bubble is 23
    %, and 1F1B's is 36 %.

    Loses: When hops are fast: it holds 15 microbatches where 1F1B holds 8 at p = 8, for the same
    bubble.

    Source: Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models",
    PPoPP 2021, arXiv 2007.01045, section 3.2, the policy with K = min(2(S−i)−1, D).

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


def seq1f1b(num_ranks: int, num_microbatches: int, num_slices: int = 2) -> Schedule:
    """Seq1F1B: 1F1B on slices of a microbatch's sequence, for long sequences and few
    microbatches.

    1F1B with k slices per microbatch: idle (p−1)T/k for slices of equal cost, and (p−1+k)/k
    microbatches of memory, or m if that is less.

    A token attends to those before it, so the slices of a microbatch run forward in order and
    backward in reverse. The first backward waits for k−1 more forwards than in 1F1B, and every op
    takes 1/k of the time. Slices of equal length cost less at the front than at the back; the
    paper cuts them so that they cost the same.

    Wins: With long sequences, where even one microbatch at a time is large: at p = 8 and m = 8,
    four slices bring 1F1B's bubble from 47 % to 18 % and its peak from 8 to 2.75 microbatches.

    Loses: When slices get so small that kernels no longer fill the device, or hops, of which there
    are k times as many, are no longer hidden. Attention must keep the keys and values of earlier
    slices.

    Source: Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language
    Model Training", NAACL 2025, arXiv 2406.03488, section 3.

    Args:
        num_slices: k; 1 is 1F1B.

    Raises:
        InputError: k is no whole number ≥ 1.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(seq1f1b(2, 2), Costs())))
    seq1f1b, predicted: makespan 7.5, bubble 20.0%, stage bubble 20.0%
    rank 0 │F0.0F0.1F1.0········B0.1────F1.1B0.0────····B1.1────B1.0────│ peak 1.5
    rank 1 │····F0.0F0.1B0.1────F1.0B0.0────F1.1B1.1────B1.0────········│ peak 1
    """
    at_least("seq1f1b", "num_slices", num_slices, 1)
    microbatches = [k for k in range(num_microbatches) for _ in range(num_slices)]
    slices = [*range(num_slices)] * num_microbatches
    ranks = (
        alternate(
            num_ranks - 1 - rank + num_slices - 1,
            Line(Kind.FORWARD, microbatches, rank, slices=slices),
            Line(Kind.BACKWARD, microbatches, rank, slices=slices[::-1]),
        )
        for rank in range(num_ranks)
    )
    return laid_out(ranks, "seq1f1b")


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
