"""DualPipeV: forwards and backwards in pairs that a device could overlap, on a V.

DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.2.1, there as DualPipe;
folding its two halves onto a V ("cut in half") needs one copy of the weights instead of two.
"""

from __future__ import annotations

from penstock.base.errors import InputError
from penstock.core.schedule.families.layout import laid_out
from penstock.core.schedule.families.phases import Phases
from penstock.core.schedule.schedule import Schedule


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Pairs of F and B on a V, with the memory of p+½ microbatches: bubble (p−1)/(6m+p−1) at
    F = I = W; (p−1)/(3m+p−1), as published, where a pair's results leave together at its end.

    In the steady phase each F of one of a rank's two stages stands right before a B of the other
    stage, of another microbatch. I and W are apart only where that shortens warm-up and cool-down.
    A device that overlaps a pair hands over both results when both are done. Here they run one
    after the other, so that F's result leaves before B starts, and the others wait half as long.

    Wins: When a device can overlap the F of one microbatch with the B of another, as with the
    all-to-all of mixture-of-experts layers: every steady F stands beside a B for that.

    Loses: When nothing is overlapped: ZB-V takes as long with half a microbatch less, and a stage
    bubble of 0 besides. It needs m ≥ 2p.

    Raises:
        InputError: fewer than 2p microbatches.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(dualpipe_v(2, 4), Costs())))
    dualpipe-v, predicted: makespan 25, bubble 4.0%, stage bubble 4.0%
    rank 0 │0F0─0F1─0F2─3F0─3I0─3W0─3F1─0F3─3B1─────3F2─0B0─────3B2─────3F3─····0B1─────3B3─────0I2─0W2─0I3─0W3─│ peak 2.5
    rank 1 │····1F0─2F0─1F1─2F1─1F2─2B0─────2F2─1B0─────1F3─2B1─────2F3─1B1─────2B2─────1B2─────2I3─1I3─2W3─1W3─│ peak 2.5
    """  # noqa: E501
    if num_microbatches < 2 * num_ranks:
        raise InputError(
            f"dualpipe-v: num_microbatches is {num_microbatches}, but {num_ranks} ranks need ≥ "
            f"{2 * num_ranks} (one per stage); cut the minibatch finer, or take zb-v"
        )
    ranks = []
    for rank in range(num_ranks):
        to_last = num_ranks - 1 - rank
        phases = (
            ("F0", 2 * to_last),
            ("F0 F1", rank + 1),
            ("I1 W F1", to_last),
            ("F0 B1 F1 B0", num_microbatches - 2 * num_ranks + rank + 1),
            ("B1 F1 B0", to_last),
            # rank + 1 pairs: their first half undivided, the second with W put off.
            ("B1 B0", (rank + 1) // 2),
            ("B1 I0", (rank + 1) % 2),
            ("I1 I0", (rank + 1) // 2),
            ("W I0", to_last),
            ("W", rank + 1),
        )
        ranks.append(Phases(phases, stages=(rank, 2 * num_ranks - 1 - rank)))
    return laid_out(ranks, "dualpipe-v")
