"""Several stages per rank, round and round: interleaved 1F1B, breadth-first, interleaved zero
bubble, spilled. Stage lap·p + s is on rank s of p.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.core.schedule.columns import Columns, Fields, joined
from penstock.core.schedule.families.layout import Line, alternate, laid_out, numbers
from penstock.core.schedule.families.options import at_least
from penstock.core.schedule.op import Kind
from penstock.core.schedule.schedule import Schedule


def interleaved(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Interleaved 1F1B: each rank holds several short stages, and microbatches run the ranks in
    laps.

    1F1B's bubble divided by v, the stages per rank: idle (p−1)T/v for p | m. Rank s holds
    ((v−1)p + 2(p−1−s) + 1)/v microbatches for m ≥ 2p−1; hops are (vp−1)/(p−1) times as many.

    Stage lap·p + s is on rank s. Microbatches go in rounds of p: the round's forwards of every lap,
    then the next round; backwards likewise, last lap first. Any number of microbatches will do: an
    incomplete last round takes the turns it would take if it were complete, which keeps the ranks
    in step, so that none waits for a lap that cannot have come round yet.

    Wins: When microbatches are few, links are fast and the backward is to stay in one piece: at p =
    8 and m = 32 the bubble falls from 18 % to 10 % with v = 2 and to 5 % with v = 4.

    Loses: When hops are slow: v = 4 sends 4.4 times the messages of 1F1B at p = 8, and with hops of
    F/2 its bubble is 38 %, above 1F1B's 36 %. It also holds 11.5 microbatches (v = 2) where 1F1B
    holds 8.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", SC 2021, arXiv 2104.04473, section 2.2.2.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(interleaved(2, 4), Costs(2, 1, 1))))
    interleaved-1f1b, predicted: makespan 36, bubble 11.1%, stage bubble 11.1%
    rank 0 │0F0─0F1─2F0─2F1─0F2─2B0─0F3─2B1─2F2─0B0─2F3─0B1─····2B2─····2B3─0B2─0B3─│ peak 2.5
    rank 1 │····1F0─1F1─3F0─3B0─3F1─3B1─1F2─1B0─1F3─1B1─3F2─3B2─3F3─3B3─1B2─1B3─····│ peak 1.5

    Args:
        stages_per_rank: v; with 1, this is 1F1B.

    Raises:
        InputError: ``stages_per_rank`` is not a whole number ≥ 1.
    """
    at_least("interleaved-1f1b", "stages_per_rank", stages_per_rank, 1)
    p, v = num_ranks, stages_per_rank
    turns = laps(p, -(-num_microbatches // p) * p, v)
    passes, microbatches = map(numbers, zip(*turns, strict=True))
    # A lap takes p beats, so each hop of a lap may take one beat, there and back. A single lap has
    # nothing to wait for but its own gradient.
    beats_per_hop = 2 if v > 1 else 1
    ranks = (
        alternate(
            (v - 1) * p + beats_per_hop * (p - 1 - rank),
            Line(Kind.FORWARD, microbatches, rank, passes, p),
            Line(Kind.BACKWARD, microbatches, (v - 1) * p + rank, passes, -p),
        )
        for rank in range(p)
    )
    return laid_out(ranks, "interleaved-1f1b", num_microbatches)


def laps(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[tuple[int, int]]:
    """(lap, microbatch) in rounds of as many microbatches as ranks; the last round may be smaller.

    >>> laps(2, 3, 2)
    [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]
    """
    return [
        (lap, k)
        for first in range(0, num_microbatches, num_ranks)
        for lap in range(stages_per_rank)
        for k in range(first, min(first + num_ranks, num_microbatches))
    ]


def breadth_first(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Breadth-first: several short stages per rank, and all microbatches of one before the next.

    GPipe's bubble divided by v, the stages per rank: idle (p−1)T/v for m ≥ p; every rank holds
    all m microbatches.

    Stage lap·p + s is on rank s. A stage's weights are used in one go, forward and backward, so
    with sharded weights each stage is gathered and reduced once per pass. Microbatches are back at
    the first rank long before that begins its second stage: a channel must hold ⌊m/p⌋ messages.

    Wins: When weights are sharded among data-parallel ranks, since each stage is gathered once per
    pass, and when hops are slow: with hops of F/2, p = 8 and m = 32 the bubble is 15 %, and
    interleaved 1F1B's is 21 %.

    Loses: When memory is short: all m microbatches are held, 32 where interleaved 1F1B holds 11.5.

    Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023, arXiv 2211.05953,
    section 4.

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
    passes = numbers([lap for lap in range(v) for _ in range(num_microbatches)])
    microbatches = numbers([*range(num_microbatches)] * v)
    ranks = (
        alternate(
            len(passes),
            Line(Kind.FORWARD, microbatches, rank, passes, p),
            Line(Kind.BACKWARD, microbatches, (v - 1) * p + rank, passes, -p),
        )
        for rank in range(p)
    )
    return laid_out(ranks, "breadth-first")


def interleaved_zb(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Interleaved zero bubble: several short stages per rank, and weight gradients that fill the
    end.

    ZB-H1's bubble divided by v, the stages per rank: idle (p−1)(F+I−W)/v for W ≤ F, I and
    p | m; every rank holds p microbatches.

    Stage lap·p + s is on rank s; rounds are as in interleaved-1f1b, warm-up and delay of W as in
    ZB-H1. A lap is done before the next one begins, so results wait in between: a channel must
    hold ⌈p/2⌉ messages.

    Wins: When microbatches are few and hops fast: at p = m = 8 the bubble is 13 %, where ZB-H1 and
    ZB-V have 23 %, all with the same memory; v = 4 brings it to 7 %.

    Loses: When hops are slow: with hops of F/2 the bubble is 30 % at p = 8 and m = 32, and ZB-H1's
    is 18 %. Its stage bubble is as large as its makespan bubble, so that post-validation gains
    nothing.

    Source: Interleaving (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM", SC 2021, arXiv 2104.04473, section 2.2.2) with the split backward
    of ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv 2401.10241, section
    2.1), in the order of torch.distributed.pipelining's ScheduleInterleavedZeroBubble.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(interleaved_zb(2, 2), Costs())))
    interleaved-zb, predicted: makespan 13, bubble 7.7%, stage bubble 7.7%
    rank 0 │0F0─0F1─2F0─2F1─····2I0─2W0─2I1─2W1─0I0─0W0─0I1─0W1─│ peak 2
    rank 1 │····1F0─1F1─3F0─3I0─3F1─3I1─3W0─1I0─3W1─1I1─1W0─1W1─│ peak 2

    Args:
        stages_per_rank: v; with 1, this is ZB-H1.

    Raises:
        InputError: ``stages_per_rank`` is not a whole number ≥ 1.
    """
    at_least("interleaved-zb", "stages_per_rank", stages_per_rank, 1)
    p, v = num_ranks, stages_per_rank
    passes, microbatches = map(numbers, zip(*laps(p, num_microbatches, v), strict=True))
    ranks = (
        alternate(
            (v - 1) * min(p, num_microbatches) + p - 1 - rank,
            Line(Kind.FORWARD, microbatches, rank, passes, p),
            Line(Kind.BACKWARD_INPUT, microbatches, (v - 1) * p + rank, passes, -p),
            Line(Kind.BACKWARD_WEIGHT, microbatches, (v - 1) * p + rank, passes, -p),
            delay=rank,
        )
        for rank in range(p)
    )
    return laid_out(ranks, "interleaved-zb")


def spilled(
    num_ranks: int, num_microbatches: int, stages_per_rank: int = 2, group: int = 0
) -> Schedule:
    """Spilled: a rank goes through its many stages one at a time, forth and back.

    Weights come into memory 2v−1 times per minibatch on a rank with v stages, whatever m is: all
    microbatches go through a stage before the next one, and through the last one there and back.

    The order is breadth-first, but the rank's last stage works as in 1F1B: on one rank each
    microbatch turns round in it, and its activations are never there twice. Stage lap·p + s is on
    rank s. The first stage stays from the end of one minibatch until the next begins.

    Wins: When weights, gradients and optimizer state are larger than memory: with every stage's
    weights on a disk, the order reads 2P+S−P₀−Pₗ bytes and writes P+S, for weights P (first and
    last stage P₀ and Pₗ) and state S, for any number of microbatches.

    Loses: When the model fits: all m microbatches are in flight on every stage but the last, where
    1F1B has p; with one rank and one stage there is nothing to gain.

    Source: Nagrecha and Kumar, "Hydra: A System for Large Multi-Model Deep Learning", arXiv
    2110.08633, section 4, whose order is that of ``group=1``; that all microbatches go through a
    stage before the next one is from Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys
    2023, arXiv 2211.05953.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(spilled(1, 2, stages_per_rank=3), Costs())))
    spilled, predicted: makespan 18, bubble 0.0%, stage bubble 0.0%
    rank 0 │0F0─0F1─1F0─1F1─2F0─2B0─────2F1─2B1─────1B0─────1B1─────0B0─────0B1─────│ peak 1.667

    Args:
        stages_per_rank: v, how many stages each rank has.
        group: so many microbatches go through all stages before the next ones; 0 is all of them. 1
            is Hydra's order, which moves the weights m times as often.

    Raises:
        InputError: ``stages_per_rank`` is no whole number ≥ 1, or ``group`` is none ≥ 0.
    """
    at_least("spilled", "stages_per_rank", stages_per_rank, 1)
    at_least("spilled", "group", group, 0)
    sizes = num_ranks, stages_per_rank, num_microbatches, group or num_microbatches
    ranks = [joined(_parts(rank, *sizes)) for rank in range(num_ranks)]
    return Schedule.of_columns(Columns.of_fields(ranks), "spilled")


def _parts(
    rank: int, num_ranks: int, num_laps: int, num_microbatches: int, group: int
) -> Iterator[Fields]:
    stages = [rank + num_ranks * lap for lap in range(num_laps)]
    for first in range(0, num_microbatches, group):
        own = range(first, min(first + group, num_microbatches))
        for stage in stages[:-1]:
            yield Line(Kind.FORWARD, own, stage).fields()
        turning = (Line(kind, own, stages[-1]) for kind in (Kind.FORWARD, Kind.BACKWARD))
        yield alternate(min(num_ranks - rank - 1, len(own)), *turning).fields()
        for stage in reversed(stages[:-1]):
            yield Line(Kind.BACKWARD, own, stage).fields()
