"""Placers that only the benchmark needs: all placements, and random ones.

They are what ``learned_placement`` and ``greedy_placement`` have to beat with the same number of
scores, so that all of them share one ledger.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from penstock.base.errors import PlanError
from penstock.core.graph import LayerGraph
from penstock.planning.partition.placement import (
    Placed,
    Placer,
    Score,
    labels_of,
    make_space,
    random_order,
)
from penstock.planning.partition.placement_space import Ledger, Space


def brute_force_placement(
    graph: LayerGraph,
    num_devices: int,
    score: Score,
    *,
    max_groups: int = 40,
    tiny: float = 0.005,
    limit: int = 200_000,
) -> Placed:
    """Score every placement of the groups.

    Args:
        graph: the profile.
        num_devices: at most so many stages.
        score: seconds of a step; less is better.
        max_groups: layers are put together until there are no more.
        tiny: and until no group has less than this share of the compute.
        limit: the most placements to score.

    Returns:
        The best there is; of equals, the first in an order that does not change.

    Raises:
        InputError: a count below 1.
        PlanError: fewer layers than devices, or more than ``limit`` placements.
    """
    space = make_space(graph, num_devices, max_groups=max_groups, tiny=tiny)
    ledger = Ledger(score, limit)
    for labels in _labellings(space):
        if ledger.ask(space.stages_of(labels, range(max(labels) + 1))) is None:
            raise PlanError(
                f"{len(space.groups)} groups on {num_devices} devices have more than {limit:,} "
                "placements; ask for fewer groups or raise limit"
            )
    return ledger.placement


def _draw(space: Space, ledger: Ledger, seed: int) -> None:
    draws = random.Random(seed)
    while not ledger.is_spent:
        labels = _random_labels(space, draws)
        ledger.ask(space.stages_of(labels, range(max(labels) + 1)))


random_placement = Placer(_draw)
"""The best of random placements: a random topological order of the groups, cut at random; each
number of stages is as likely as another.

Every one of them is a pipeline, which makes this a better rival than random devices would be.
"""


def _random_labels(space: Space, draws: random.Random) -> tuple[int, ...]:
    """The stage of each group in a random order with random cuts."""
    num_stages = draws.randint(1, space.num_devices)
    order = random_order(space, draws)
    inner = sorted(draws.sample(range(1, len(order)), num_stages - 1))
    return labels_of((0, *inner, len(order)), order)


def _labellings(space: Space) -> Iterator[tuple[int, ...]]:
    """Every way to number the groups by stages such that none reads from a later one, and no
    stage is empty; so every placement, in every order that its devices allow."""
    labels: list[int] = []

    def extend() -> Iterator[tuple[int, ...]]:
        if len(labels) == len(space.groups):
            if len(set(labels)) == max(labels) + 1:
                yield tuple(labels)
            return
        least = max((labels[producer] for producer in space.producers[len(labels)]), default=0)
        for label in range(least, space.num_devices):
            labels.append(label)
            yield from extend()
            labels.pop()

    return extend()
