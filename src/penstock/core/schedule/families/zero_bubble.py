"""Zero bubble: backwards in two halves, of which the second fills what would be idle; on a straight
pipeline, or on a V of two stages per rank.
"""

from __future__ import annotations

from penstock.base.errors import InputError
from penstock.core.schedule.families.layout import Phases, alternate_split, laid_out
from penstock.core.schedule.schedule import Schedule


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1: 1F1B with the backward split, and weight gradients put off to fill the end.

    A third of 1F1B's bubble with 1F1B's memory: idle (p−1)(F+I−W) for W ≤ F, I and m ≥ p; every
    rank holds p microbatches.

    The next rank waits for I alone, not for W. Rank s keeps W back by s microbatches, as many as
    1F1B's memory has room for, and spends them where 1F1B waits for its last gradients. Hops of
    c ≤ W/2 stretch a rank's work by 4(p−1)c, for m ≥ 2p−1.

    Wins: Against 1F1B nearly always, if layers can split their backward: same memory, same
    messages, and a bubble of 7 % instead of 18 % at p = 8, m = 32 and F = I = W.

    Loses: When W is short: at W = F/2 the bubble is 12 % (1F1B: 20 %). With fast hops, two stages
    per rank do better: ZB-V has half the bubble for twice the messages.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv 2401.10241, section 2.1.

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


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H2: ZB-H1 with twice the microbatches in flight, so that no rank waits once it has
    begun.

    No bubble inside a rank's own work: idle (p−1)·max(0, F+I−2W) from its first op to its last,
    for W ≤ F and m ≥ 2p−1; every rank holds min(2p−1, m) microbatches.

    Rank s begins s forwards late and ends as late. That gains only where ranks need not wait for
    each other between steps; a flush makes the bubble ZB-H1's if F = I = W. Hops of c ≤ W/2 stretch
    a rank's work by 2(p−1)c.

    Wins: When the update does not synchronise the ranks (post-validation) and W is about as long as
    F and I: the stage bubble is 0. Its many microbatches in flight also hide slow hops: with hops
    of F/2, p = 8 and m = 32 the bubble of a flushed step is 10 %, and ZB-H1's is 18 %.

    Loses: When every step ends in a flush, hops are fast and F = I = W: it takes as long as ZB-H1
    with 15 microbatches in memory instead of 8 at p = 8. With m = p it takes longer.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv 2401.10241, section 2.2.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(zb_h2(3, 5), Costs())))
    zb-h2, predicted: makespan 17, bubble 11.8%, stage bubble 0.0%
    rank 0 │F0F1F2F3F4I0W0I1W1I2W2I3W3I4W4····│ peak 5
    rank 1 │··F0F1F2I0F3I1F4I2W0I3W1I4W2W3W4··│ peak 5
    rank 2 │····F0I0F1I1F2I2F3I3F4I4W0W1W2W3W4│ peak 5
    """
    ranks = (
        alternate_split(rank, num_microbatches, warm_up=2 * (num_ranks - 1 - rank), delay=2 * rank)
        for rank in range(num_ranks)
    )
    return laid_out(ranks, "zb-h2")


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: zero bubble with the memory of 1F1B, on a V of two stages per rank.

    Zero bubble on a V: stage bubble 0 and (p−1)/(6m+p−1) of the makespan at F = I = W, with the
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

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv 2401.10241, section 6.

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


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipeV: forwards and backwards in pairs that a device could overlap, on a V.

    Pairs of F and B on a V, with the memory of p+½ microbatches: bubble (p−1)/(6m+p−1) at
    F = I = W; (p−1)/(3m+p−1), as published, where a pair's results leave together at its end.

    In the steady phase each F of one of a rank's two stages stands right before a B of the other
    stage, of another microbatch. I and W are apart only where that shortens warm-up and cool-down.
    A device that overlaps a pair hands over both results when both are done. Here they run one
    after the other, so that F's result leaves before B starts, and the others wait half as long.

    Wins: When a device can overlap the F of one microbatch with the B of another, as with the
    all-to-all of mixture-of-experts layers: every steady F stands beside a B for that.

    Loses: When nothing is overlapped: ZB-V takes as long with half a microbatch less, and a stage
    bubble of 0 besides. It needs m ≥ 2p.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.2.1, there as
    DualPipe; folding its two halves onto a V ("cut in half") needs one copy of the weights instead
    of two.

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
