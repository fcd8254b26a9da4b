"""ZB-V: zero bubble with the memory of 1F1B, on a V of two stages per rank.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv 2401.10241, section 6.
"""

from __future__ import annotations

from penstock.core.schedule.families.layout import laid_out
from penstock.core.schedule.families.phases import Phases
from penstock.core.schedule.schedule import Schedule


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Zero bubble on a V: stage bubble 0 and (p−1)/(6m+p−1) of the makespan at F = I = W, with the
    memory of p microbatches on every rank.

    Stage s is on rank s on the way there and on rank 2p−1−s on the way back, so that the first rank
    starts and ends every microbatch. Both laws hold for m ≥ 2p−1. With fewer, it is the schedule of
    2p−1 microbatches without the ops of those that are not there; a rank then idles for about
    4p−2−2m ops (an op being one of F, I, W at one of its two stages) instead of p−1.

    Wins: When hops are fast: at F = I = W and m ≥ 2p−1 no family with two stages per rank has a
    shorter step, and it holds no more than 1F1B (4 % of bubble at p = 8 and m = 32, 1F1B has
    18 %); with post-validation, no bubble is left.

    Loses: When hops are slow, as it sends twice the messages of ZB-H1: with hops of F/2 both have a
    bubble of 18 %. With m < 2p−1, interleaved zero bubble is shorter: 13 % instead of 23 % at p = m
    = 8.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(zb_v(2, 3), Costs())))
    zb-v, predicted: makespan 19, bubble 5.3%, stage bubble 0.0%
    rank 0 │0F0─0F1─0F2─3F0─3I0─3W0─3F1─3I1─3W1─0I0─0W0─3F2─3I2─3W2─0I1─0W1─0I2─0W2─····│ peak 2
    rank 1 │····1F0─2F0─1F1─2F1─2I0─2W0─1F2─1I0─1W0─2F2─2I1─2W1─1I1─2I2─1I2─1W1─2W2─1W2─│ peak 2
    """
    # The order is made for a full pipe; ops left out of it leave its dependencies intact.
    full = max(num_microbatches, 2 * num_ranks - 1)
    ranks = []
    for rank in range(num_ranks):
        to_last = num_ranks - 1 - rank
        phases = (
            ("F0", 2 * to_last + 1),
            ("F1 F0", rank),
            ("F1 I1 W", to_last + 1),
            ("F0 I0 W F1 I1 W", full - 2 * num_ranks + 1 + rank),
            ("I0 W F1 I1 W", to_last),
            ("I0 I1", rank),
            ("I0 W", to_last + 1),
            ("W", 2 * rank),
        )
        ranks.append(Phases(phases, stages=(rank, 2 * num_ranks - 1 - rank)))
    return laid_out(ranks, "zb-v", num_microbatches)
