"""V-Min: a third of the activations of 1F1B, for a bubble between V-Half's and 1F1B's.

Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, arXiv 2405.15362,
section 3.
"""

from __future__ import annotations

from penstock.core.schedule.families.building_block import from_block
from penstock.core.schedule.schedule import Schedule


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """A third of the memory of 1F1B, ⌊(p+4)/3⌋ microbatches, and about two thirds of its bubble: at
    F = I = W, m > p ≥ 3, a rank idles for 4p−5 ops, 4p−7 if 3 | p, beside the 6m it performs.

    An op is one of F, I, W at one of a rank's two stages. Two ranks
    idle for 1 op. Where F, I and W differ, the bubble grows with m. The order comes from a
    block, see ``building_block.py``, and does not depend on costs.

    Wins: When nothing else fits: 4 microbatches at p = 8 where 1F1B holds 8, with a bubble of 12 %
    instead of 18 % at m = 32 and F = I = W.

    Loses: When F, I and W differ or hops take time: at W = F/2 and hops of 0.03 F the bubble is 30
    %, and 1F1B's is 20 %. V-Half holds one microbatch more there and has 13 %.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(v_min(2, 3), Costs())))
    v-min, predicted: makespan 19, bubble 5.3%, stage bubble 5.3%
    rank 0 │0F0─0F1─0F2─3F0─3I0─3W0─3F1─0I0─3I1─0W0─3W1─0I1─0W1─3F2─3I2─3W2─····0I2─0W2─│ peak 2
    rank 1 │····1F0─2F0─1F1─2F1─2I0─1I0─2W0─1W0─2I1─1I1─1F2─2F2─2W1─1W1─2I2─1I2─2W2─1W2─│ peak 2
    """
    p = num_ranks
    # Keeps the ops of a rank in different slots of the block.
    delay = 0 if p % 3 else 2
    block = [(i, 2 * p - i - 1, 2 * p + delay + i, 4 * p + delay - i - 1) for i in range(p)]
    return from_block(block, num_microbatches, "v-min")
