"""Interleaved zero bubble: several short stages per rank, and weight gradients that fill the end.

Interleaving (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021, arXiv 2104.04473, section 2.2.2) with the split backward of ZB-H1 (Qi et al.,
"Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv 2401.10241, section 2.1), in the order of
torch.distributed.pipelining's ScheduleInterleavedZeroBubble.
"""

from __future__ import annotations

from penstock.core.schedule.families.alternate import Line, alternate
from penstock.core.schedule.families.interleaved import laps
from penstock.core.schedule.families.layout import laid_out
from penstock.core.schedule.families.options import at_least
from penstock.core.schedule.op import Kind
from penstock.core.schedule.schedule import Schedule


def interleaved_zb(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """ZB-H1's bubble divided by v, the stages per rank: idle (p−1)(F+I−W)/v for W ≤ F, I and
    p | m; every rank holds p microbatches.

    Stage lap·p + s is on rank s; rounds are as in interleaved-1f1b, warm-up and delay of W as in
    ZB-H1. A lap is done before the next one begins, so results wait in between: a channel must
    hold ⌈p/2⌉ messages.

    Wins: When microbatches are few and hops fast: at p = m = 8 the bubble is 13 %, where ZB-H1 and
    ZB-V have 23 %, all with the same memory; v = 4 brings it to 7 %.

    Loses: When hops are slow: with hops of F/2 the bubble is 30 % at p = 8 and m = 32, and ZB-H1's
    is 18 %. Its stage bubble is as large as its makespan bubble, so that post-validation gains
    nothing.

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
    passes, microbatches = zip(*laps(p, num_microbatches, v), strict=True)
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
