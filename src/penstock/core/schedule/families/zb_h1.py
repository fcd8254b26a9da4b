"""ZB-H1: 1F1B with the backward split, and weight gradients put off to fill the end.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv 2401.10241, section 2.1.
"""

from __future__ import annotations

from penstock.core.schedule.families.alternate import alternate_split
from penstock.core.schedule.families.layout import laid_out
from penstock.core.schedule.schedule import Schedule


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """A third of 1F1B's bubble with 1F1B's memory: idle (p−1)(F+I−W) for W ≤ F, I and m ≥ p; every
    rank holds p microbatches.

    The next rank waits for I alone, not for W. Rank s keeps W back by s microbatches, as many as
    1F1B's memory has room for, and spends them where 1F1B waits for its last gradients. Hops of
    c ≤ W/2 stretch a rank's work by 4(p−1)c, for m ≥ 2p−1.

    Wins: Against 1F1B nearly always, if layers can split their backward: same memory, same
    messages, and a bubble of 7 % instead of 18 % at p = 8, m = 32 and F = I = W.

    Loses: When W is short: at W = F/2 the bubble is 12 % (1F1B: 20 %). With fast hops, two stages
    per rank do better: ZB-V has half the bubble for twice the messages.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(zb_h1(3, 4), Costs())))
    zb-h1, predicted: makespan 14, bubble 14.3%, stage bubble 14.3%
    rank 0 │F0F1F2····I0W0F3I1W1I2W2I3W3│ peak 3
    rank 1 │··F0F1··I0F2I1W0F3I2W1I3W2W3│ peak 3
    rank 2 │····F0I0F1I1F2I2W0F3I3W1W2W3│ peak 3
    """
    ranks = (
        alternate_split(rank, num_microbatches, warm_up=num_ranks - 1 - rank, delay=rank)
        for rank in range(num_ranks)
    )
    return laid_out(ranks, "zb-h1")
