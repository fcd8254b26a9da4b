"""DAPPLE's three ways to give devices to the replicas of a stage, and its bound of a step.

Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", PPoPP 2021,
arXiv 2007.01045, section 4.2. Stages are given devices one after another, from the first. A
*server* is an innermost group of the cluster's tree; devices outside of all groups are servers of
their own, unless there are no groups at all: then all devices are one server. A server is *fresh*
while none of its devices is taken, and *full* when all are. Within a server, devices are taken in
the cluster's order, and servers that a rule does not tell apart in theirs.

- **fresh-first** fills fresh servers one by one, then those partly used, the emptiest first: the
  replicas of a stage stay together, which their gradients want.
- **append-first** fills the servers partly used, the fullest first, then fresh ones: nothing is
  left over in small pieces, and neighbouring stages meet in a server, which activations want.
- **scatter-first** takes one device at a time from the server that the stage has fewest of, the
  emptiest first: every server sees a part of each stage, which suits stages whose replicas have
  little to exchange.

The paper (section 4.1) estimates a step in three parts: until its *pivot* stage starts, the pivot's
steady work, and what is left when that ends. The bound (``Reached``) is the part of this idea that
can be proven, whichever stage is the pivot: no 1F1B step with these stages is shorter. It is no
prediction: rank with the simulator.

Let a stage Q have M microbatches to do. Its first forward waits for the stages and hops before it,
Q itself is busy for M(F_Q+B_Q), and its last gradient has to go back to the first stage. If the
link before Q is busy for longer, that counts instead. The longest over all Q is the bound: what the
paper's estimate says for the best pivot, but with links that carry one message each way at a time,
and with a stage's reduction only where it must come later.

The paper's early backwards (section 3.2: K = min(S−i, D) or min(2(S−i)−1, D) forwards before the
first backward) are the schedule families ``1f1b`` and ``eager-1f1b``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Literal, NamedTuple, get_args

from penstock.base.errors import PlanError
from penstock.base.values import one_of
from penstock.core.cluster import Cluster, Topology


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


Rule = Literal["fresh-first", "append-first", "scatter-first"]
RULES: tuple[Rule, ...] = get_args(Rule)


def servers(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """The devices of each server, by their places in ``cluster.devices``."""
    paths = Topology(cluster).paths
    if not any(paths):
        return (tuple(range(len(paths))),)
    members: dict[object, list[int]] = {}
    for device, path in enumerate(paths):
        members.setdefault(path[-1] if path else ("alone", device), []).append(device)
    return tuple(map(tuple, members.values()))


def take(
    rule: Rule, sizes: Sequence[int], used: Sequence[int], num_replicas: int
) -> tuple[int, ...]:
    """How many devices of each server a stage takes.

    >>> take("append-first", sizes=[4, 4], used=[1, 0], num_replicas=4)
    (3, 1)

    Args:
        rule: fresh-first, append-first or scatter-first, as this module says.
        sizes: devices of each server.
        used: how many of them are taken already.
        num_replicas: how many to take.

    Returns:
        A count per server.

    Raises:
        InputError: no such rule.
        PlanError: fewer devices are free.
    """
    one_of("rule", rule, RULES)
    free = [size - gone for size, gone in zip(sizes, used, strict=True)]
    if num_replicas > sum(free):
        raise PlanError(
            f"{num_replicas} replicas do not fit on {sum(free)} free devices; ask for fewer"
        )
    if rule == "scatter-first":
        return _scattered(free, num_replicas)
    fresh_last = rule == "append-first"

    def turn(server: int) -> tuple[bool, int]:
        is_fresh = not used[server]
        emptiness = 0 if is_fresh else free[server]
        return is_fresh is fresh_last, emptiness if fresh_last else -emptiness

    taken, left = [0] * len(sizes), num_replicas
    for server in sorted(range(len(sizes)), key=turn):
        taken[server] = min(left, free[server])
        left -= taken[server]
    return tuple(taken)


def _scattered(free: Sequence[int], num_replicas: int) -> tuple[int, ...]:
    taken = [0] * len(free)
    for _ in range(num_replicas):
        open_ones = (server for server, count in enumerate(free) if taken[server] < count)
        least = min(open_ones, key=lambda server: (taken[server], taken[server] - free[server]))
        taken[least] += 1
    return tuple(taken)


def devices_of(
    groups: Sequence[Sequence[int]], used: Sequence[int], taken: Sequence[int]
) -> tuple[int, ...]:
    """The next free devices of each server, ascending.

    Args:
        groups: devices of each server.
        used: how many of them are taken already.
        taken: how many more to take.
    """
    rows = zip(groups, used, taken, strict=True)
    return tuple(
        sorted(device for group, gone, more in rows for device in group[gone : gone + more])
    )
