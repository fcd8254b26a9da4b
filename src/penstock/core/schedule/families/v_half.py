"""V-Half: half the activations of 1F1B, and a smaller bubble too, on a V of two stages per rank.

Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, arXiv 2405.15362,
section 3.
"""

from __future__ import annotations

from penstock.core.schedule.families.building_block import from_block
from penstock.core.schedule.schedule import Schedule


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Half the memory of 1F1B, ⌊(p+2)/2⌋ microbatches, and about half its bubble: at F = I = W,
    m ≥ p ≥ 3, a rank idles for 3p−7 ops if p is even, 3p−4 if odd, beside the 6m it performs.

    An op is one of F, I, W at one of a rank's two stages. Two ranks
    idle for 1 op. The order comes from a block, see ``building_block.py``, and does not
    depend on costs.

    Wins: When memory is short and F, I and W are alike: 5 microbatches at p = 8 where 1F1B holds 8,
    and still a bubble of 8 % instead of 18 % at m = 32.

    Loses: When they are not alike, or hops are slow: at F = 2I = 2W the bubble is 1F1B's 18 %, and
    with hops of F/2 it is 35 %. ZB-V has less than half the bubble where its p microbatches fit.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(v_half(2, 3), Costs())))
    v-half, predicted: makespan 19, bubble 5.3%, stage bubble 0.0%
    rank 0 │0F0─0F1─0F2─3F0─3I0─3W0─3F1─3I1─0I0─0W0─3W1─3F2─3I2─0I1─0W1─0I2─3W2─0W2─····│ peak 2
    rank 1 │····1F0─2F0─1F1─2F1─2I0─2W0─1I0─1W0─1F2─2F2─2I1─1I1─2I2─1I2─2W1─1W1─2W2─1W2─│ peak 2
    """
    p = num_ranks
    # Keeps the ops of a rank in different slots of the block.
    delay = 0 if p % 2 else 3
    block = [
        (2 * i, 3 * p - i - 2, 3 * p + delay + 2 * i - 1, 6 * p + delay - i - 2) for i in range(p)
    ]
    return from_block(block, num_microbatches, "v-half")
