"""No synchronous step with these stages is shorter: the bound that DAPPLE's planner prunes with.

Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", PPoPP 2021,
arXiv 2007.01045, section 4.1, estimates a step in three parts: until its *pivot* stage starts, the
pivot's steady work, and what is left when that ends. The bound is the part of this idea that can be
proven. It is no prediction: rank with the simulator.

The paper's early backwards (section 3.2: K = min(S−i, D) or min(2(S−i)−1, D) forwards before the
first backward) are the schedule families ``1f1b`` and ``eager-1f1b``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, lcm
from typing import NamedTuple

from penstock.errors import InputError

Seconds = Sequence[float]


def lower_bound(
    forward: Seconds,
    backward: Seconds,
    reduce: Seconds,
    num_microbatches: int,
    *,
    hops: Seconds = (),
    links: Seconds = (),
    replicas: Sequence[int] = (),
) -> float:
    """No 1F1B step with these costs is shorter, whichever stage is the pivot.

    Let a stage Q have M microbatches to do. Its first forward waits for the stages and hops before
    it, Q itself is busy for M(F_Q+B_Q), and its last gradient has to go back to the first stage.
    If the link before Q is busy for longer, that counts instead. The longest over all Q is the
    bound: what the paper's estimate says for the best pivot, but with links that carry one message
    each way at a time, and with a stage's reduction only where it must come later.

    >>> lower_bound([1, 1], [2, 2], [0, 0], num_microbatches=4)
    15.0

    Args:
        forward: seconds of one microbatch at each stage.
        backward: likewise.
        reduce: seconds until the replicas' gradients are summed, of each stage.
        num_microbatches: per minibatch.
        hops: seconds from each stage but the last to the next; none by default.
        links: of each hop, how long a message keeps the link between two ranks busy
            (``Costs.link``); 0 by default.
        replicas: of each stage, which take microbatches in turn, so that the busiest has
            ⌈M/r⌉; one of each by default.

    Returns:
        Seconds of a minibatch without the optimizer's step.

    Raises:
        InputError: no stage, lists of different lengths, negative seconds, a count below 1.
    """
    _check(forward, backward, num_microbatches, reduce, hops, links)
    counts = replicas or (1,) * len(forward)
    if len(counts) != len(forward) or min(counts) < 1:
        raise InputError(f"replicas is {tuple(counts)}; give a count ≥ 1 for each stage")
    nothing = (0.0,) * (len(forward) - 1)
    so_far, before = Reached(), counts[0]
    edges = zip((0.0, *(hops or nothing)), (0.0, *(links or nothing)), strict=True)
    stages = zip(forward, backward, reduce, counts, edges, strict=True)
    for ahead, behind, summing, count, (hop, link) in stages:
        shares = busiest(num_microbatches, before, count)
        so_far = so_far.then((ahead, behind, summing), (hop, link), shares)
        before = count
    return so_far.bound


class Reached(NamedTuple):
    """``lower_bound`` of the stages so far, and what it needs for the next one.

    Attributes:
        bound: the longest time that one of them decides.
        forward: seconds until the first microbatch has passed them.
        back: seconds from the last gradient's arrival until all of them have their sums.
    """

    bound: float = 0.0
    forward: float = 0.0
    back: float = 0.0

    def then(
        self,
        stage: tuple[float, float, float],
        edge: tuple[float, float],
        shares: tuple[int, int],
    ) -> Reached:
        """With one more stage.

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


def _check(
    forward: Seconds,
    backward: Seconds,
    num_microbatches: int,
    reduce: Seconds,
    hops: Seconds,
    links: Seconds,
) -> None:
    if not forward:
        raise InputError("a bound needs at least one stage")
    if num_microbatches < 1:
        raise InputError(f"num_microbatches is {num_microbatches}, but must be ≥ 1")
    lists = [("forward", forward, 0), ("backward", backward, 0), ("reduce", reduce, 0)]
    lists += [(name, edges, 1) for name, edges in (("hops", hops), ("links", links)) if edges]
    for name, values, fewer in lists:
        if len(values) != len(forward) - fewer:
            raise InputError(
                f"{name} has {len(values)} numbers, but {len(forward)} stages need "
                f"{len(forward) - fewer}"
            )
        bad = [value for value in values if not (value >= 0 and isfinite(value))]
        if bad:
            raise InputError(f"{name} has {bad[0]}; seconds must be ≥ 0 and finite")
