"""No 1F1B step with these stages is shorter: the bound that DAPPLE's planner prunes with.

Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", PPoPP 2021,
arXiv 2007.01045, section 4.1, estimates a step in three parts: until its *pivot* stage starts, the
pivot's steady work, and what is left when that ends. The bound is the part of this idea that can be
proven, whichever stage is the pivot. It is no prediction: rank with the simulator.

Let a stage Q have M microbatches to do. Its first forward waits for the stages and hops before it,
Q itself is busy for M(F_Q+B_Q), and its last gradient has to go back to the first stage. If the
link before Q is busy for longer, that counts instead. The longest over all Q is the bound: what the
paper's estimate says for the best pivot, but with links that carry one message each way at a time,
and with a stage's reduction only where it must come later.

The paper's early backwards (section 3.2: K = min(S−i, D) or min(2(S−i)−1, D) forwards before the
first backward) are the schedule families ``1f1b`` and ``eager-1f1b``.
"""

from __future__ import annotations

from math import lcm
from typing import NamedTuple


class Reached(NamedTuple):
    """The bound of the stages so far, and what it needs for the next one.

    Attributes:
        bound: the longest time that one of them decides.
        forward: seconds until the first microbatch has passed them.
        back: seconds from the last gradient's arrival until all of them have their sums.
    """

    bound: float = 0.0
    forward: float = 0.0
    back: float = 0.0

    def then(
        self, stage: tuple[float, float, float], edge: tuple[float, float], shares: tuple[int, int]
    ) -> Reached:
        """The bound of the stages so far and one more behind them.

        Args:
            stage: its forward, backward and reduction, in seconds.
            edge: seconds of the hop to it, and for how many of them the link is busy.
            shares: microbatches of its busiest replica, and of the busiest link to it.
        """
        (ahead, behind, summing), (hop, link) = stage, edge
        work = max(shares[0] * (ahead + behind), (shares[1] - 1) * link + ahead + behind)
        reached, back = self.forward + hop, max(self.back + hop, summing)
        bound = max(self.bound, reached + work + back)
        return Reached(bound, reached + ahead, back + behind)


def busiest(num_microbatches: int, before: int, count: int) -> tuple[int, int]:
    """Microbatches of the busiest replica of a stage, and of the busiest link to it.

    Args:
        num_microbatches: per minibatch, taken in turns.
        before: replicas of the stage before it; where there is none, as many as it has itself.
        count: replicas of the stage.
    """
    return -(-num_microbatches // count), -(-num_microbatches // lcm(before, count))
