"""PARTIME: every frame of a live stream trains the model; its gradient goes through newer frames.

Meloni et al., "PARTIME: Scalable and Parallel Processing Over Time with Deep Neural Networks",
arXiv 2210.09147; the recurrence is that of Malinowski et al., "Sideways: Depth-Parallel Training of
Video Models", CVPR 2020, arXiv 2001.06232.
"""

from __future__ import annotations

from penstock.core.schedule.families.alternate import alternate, in_order
from penstock.core.schedule.families.layout import laid_out
from penstock.core.schedule.op import Kind
from penstock.core.schedule.schedule import Schedule


def partime(num_ranks: int, num_microbatches: int) -> Schedule:
    """No bubble in a stream that goes on, one version of the weights and one frame's activations
    everywhere: a frame every max(T_s, (p·T_s + 2(p−1)c)/(2p−1)) with T_s = F + B, so that hops c up
    to T_s/2 are free.

    A microbatch is a frame. Backwards bear the number of the frame whose loss they come from; they
    go through what the newest forward of their stage has left, which is 2(p−1−s) frames younger.
    The order is that of eager 1F1B without an end: what is on its way to a stage when the stream
    ends finds no frame to go through and is dropped. Each backward is an update.

    Wins: On streams that change little from frame to frame and come too fast for one device: p
    devices take p times the frames, each with the memory of its own layers only.

    Loses: Wherever frames have little to do with each other, as in shuffled data or at cuts: a
    gradient then goes through a frame that it knows nothing of. And for latency: a frame still
    passes through all stages, up to p ticks at full load.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(partime(3, 17), Costs(), arrivals=1 / 3).steady(5)))
    partime, predicted: makespan 16, bubble 6.2%, stage bubble 0.0%
    rank 0 │F6─B2────F7─B3────F8─B4────F9─B5────F10B6────···│ peak 1
    rank 1 │···F6─B4────F7─B5────F8─B6────F9─B7────F10B8────│ peak 1
    rank 2 │B5────F6─B6────F7─B7────F8─B8────F9─B9────F10···│ peak 1
    """
    ranks = (
        alternate(
            2 * (num_ranks - 1 - rank),
            in_order(rank, Kind.FORWARD, num_microbatches),
            in_order(rank, Kind.BACKWARD, num_microbatches),
        )
        for rank in range(num_ranks)
    )
    return laid_out(ranks, "partime", activations="newest")
