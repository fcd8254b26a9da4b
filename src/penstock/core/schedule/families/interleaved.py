"""Interleaved 1F1B: each rank holds several short stages, and microbatches run the ranks in laps.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
SC 2021, arXiv 2104.04473, section 2.2.2.
"""

from __future__ import annotations

from penstock.core.schedule.families.alternate import Line, alternate
from penstock.core.schedule.families.layout import laid_out
from penstock.core.schedule.families.options import at_least
from penstock.core.schedule.op import Kind
from penstock.core.schedule.schedule import Schedule


def interleaved(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """1F1B's bubble divided by v, the stages per rank: idle (p−1)T/v for p | m. Rank s holds
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
    passes, microbatches = zip(*laps(p, -(-num_microbatches // p) * p, v), strict=True)
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
