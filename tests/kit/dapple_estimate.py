"""DAPPLE's formulas for whole pipelines, which its planner here takes stage by stage: the bound of
a step, the paper's estimate and its pivot, and devices where all stages follow one rule.

Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", PPoPP 2021,
arXiv 2007.01045, sections 4.1 and 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from penstock.core.cluster import Cluster
from penstock.planning.partition.dapple_rules import (
    RULES,
    Reached,
    Rule,
    busiest,
    devices_of,
    servers,
    take,
)

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
    """The bound of ``dapple.bound`` for whole pipelines.

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
    """
    counts = replicas or (1,) * len(forward)
    nothing = (0.0,) * (len(forward) - 1)
    so_far, before = Reached(), counts[0]
    edges = zip((0.0, *(hops or nothing)), (0.0, *(links or nothing)), strict=True)
    stages = zip(forward, backward, reduce, counts, edges, strict=True)
    for ahead, behind, summing, count, (hop, link) in stages:
        shares = busiest(num_microbatches, before, count)
        so_far = so_far.then((ahead, behind, summing), (hop, link), shares)
        before = count
    return so_far.bound


def pivot(forward: Seconds, backward: Seconds, num_microbatches: int) -> int:
    """The stage whose steady work decides the length of a step.

    Begins at the last stage and goes back to the first; an earlier stage takes over if its own
    steady work is longer than the pivot's together with the stages in between (section 4.1).

    >>> pivot([1, 5, 1], [1, 5, 1], num_microbatches=8)
    1

    Args:
        forward: seconds of one microbatch at each stage, communication counted as stages.
        backward: likewise.
        num_microbatches: per minibatch.

    Returns:
        Its index among the stages given.
    """
    chosen, between, steady = len(forward) - 1, 0.0, num_microbatches - 1
    for stage in range(len(forward) - 2, -1, -1):
        own, other = (forward[at] + backward[at] for at in (stage, chosen))
        if steady * own > steady * other + between:
            chosen, between = stage, 0.0
        else:
            between += own
    return chosen


def latency(
    forward: Seconds,
    backward: Seconds,
    reduce: Seconds,
    num_microbatches: int,
    *,
    hops: Seconds = (),
) -> float:
    """DAPPLE's estimate of a step: Σ_{s≤Q} F_s + (M−1)(F_Q+B_Q) + max_s(AR_s + tail_s), Q the
    pivot; tail_s is Σ_{s≤a≤Q} B_a up to the pivot and −Σ_{Q≤a≤s} B_a behind it (section 4.1).

    It is no bound where links are full duplex and the pivot is a hop, as the paper lets a link
    carry one message at a time; nor where a stage behind a slow pivot has a long reduction, since
    that stage is done earlier than the tail says. ``lower_bound`` leaves both out.

    >>> latency([1, 1], [2, 2], [0, 0], num_microbatches=4)  # (m + p − 1)(F + B)
    15

    Args:
        forward: seconds of one microbatch at each stage.
        backward: likewise.
        reduce: seconds until the replicas' gradients are summed, of each stage.
        num_microbatches: per minibatch.
        hops: seconds from each stage but the last to the next, which become stages of their own;
            none by default.

    Returns:
        Seconds of a minibatch without the optimizer's step.
    """
    if hops:
        forward, backward = _interleaved(forward, hops), _interleaved(backward, hops)
        reduce = _interleaved(reduce, [0.0] * len(hops))
    middle = pivot(forward, backward, num_microbatches)
    before = list(accumulate(backward, initial=0))
    ends = (
        seconds + before[middle + 1] - before[stage]
        if stage <= middle
        else seconds - (before[stage + 1] - before[middle])
        for stage, seconds in enumerate(reduce)
    )
    steady = (num_microbatches - 1) * (forward[middle] + backward[middle])
    return sum(forward[: middle + 1]) + steady + max(ends)


def _interleaved(stages: Seconds, hops: Seconds) -> list[float]:
    pairs = zip(stages, hops, strict=False)
    return [*(one for pair in pairs for one in pair), stages[-1]]


def placements(cluster: Cluster, replicas: Sequence[int]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The devices of every stage when all stages follow the same rule.

    Args:
        cluster: whose innermost groups are the servers.
        replicas: of each stage.

    Returns:
        By the rule's name: for every stage, places in ``cluster.devices``, ascending; none twice.
    """
    return {rule: tuple(_by_rule(rule, servers(cluster), replicas)) for rule in RULES}


def _by_rule(
    rule: Rule, groups: Sequence[Sequence[int]], replicas: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    sizes, used = [len(group) for group in groups], [0] * len(groups)
    for count in replicas:
        taken = take(rule, sizes, used, count)
        yield devices_of(groups, used, taken)
        used = [before + more for before, more in zip(used, taken, strict=True)]
