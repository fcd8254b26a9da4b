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
    >>> print(draw(simulate(v_half(2, 4), Costs())))
    v-half, predicted: makespan 25, bubble 4.0%, stage bubble 0.0%
    rank 0 │F0aF1aF2aF0bI0bW0bF1bI1bI0aW0aW1bF2bF3aI2bI1aW1aW2bF3bI3bI2aW2aI3aW3bW3a···│ peak 2
    rank 1 │···F0aF0bF1aF1bI0bW0bI0aW0aF2aF2bI1bW1bI1aW1aF3aF3bI2bI2aI3bI3aW2bW2aW3bW3a│ peak 2
    """
    p = num_ranks
    # Keeps the ops of a rank in different slots of the block.
    delay = 0 if p % 2 else 3
    block = [
        (2 * i, 3 * p - i - 2, 3 * p + delay + 2 * i - 1, 6 * p + delay - i - 2) for i in range(p)
    ]
    return from_block(block, num_microbatches, "v-half")
