"""Placers that do not learn: all placements, random ones, and hill climbing.

They are what a learned placer has to beat with the same number of scores, so that all of them share
one ledger. On a chain none can be better than ``balance``, which is exact for the slowest stage.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

from penstock.errors import PlanError
from penstock.graph import LayerGraph
from penstock.partition.chain import balance
from penstock.partition.placement.ledger import Ledger, Placement, Placer
from penstock.partition.placement.space import Score, Space, make_space


def brute_force_placement(
    graph: LayerGraph,
    num_devices: int,
    score: Score,
    *,
    max_groups: int = 40,
    tiny: float = 0.005,
    limit: int = 200_000,
) -> Placement:
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
    for labels in space.labellings():
        if ledger.ask(space.stages_of(labels, range(max(labels) + 1))) is None:
            raise PlanError(
                f"{len(space.groups)} groups on {num_devices} devices have more than {limit:,} "
                "placements; ask for fewer groups or raise limit"
            )
    return ledger.placement


def _draw(space: Space, ledger: Ledger, seed: int) -> None:
    draws = random.Random(seed)
    while not ledger.is_spent:
        labels = random_labels(space, draws)
        ledger.ask(space.stages_of(labels, range(max(labels) + 1)))


random_placement = Placer(_draw)
"""The best of random placements: a random topological order of the groups, cut at random; each
number of stages is as likely as another.

Every one of them is a pipeline, which makes this a better rival than random devices would be.
"""


def random_labels(space: Space, draws: random.Random) -> tuple[int, ...]:
    """The stage of each group in a random order with random cuts."""
    num_stages = draws.randint(1, space.num_devices)
    order = _random_order(space, draws)
    inner = sorted(draws.sample(range(1, len(order)), num_stages - 1))
    return _labels((0, *inner, len(order)), order)


def _labels(cuts: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    labels = [0] * len(order)
    for stage, (start, stop) in enumerate(pairwise(cuts)):
        for group in order[start:stop]:
            labels[group] = stage
    return tuple(labels)


def _random_order(space: Space, draws: random.Random) -> list[int]:
    waits = [len(producers) for producers in space.producers]
    ready = [group for group, count in enumerate(waits) if not count]
    order = []
    while ready:
        group = ready.pop(draws.randrange(len(ready)))
        order.append(group)
        for source, reader in space.edges:
            if source == group:
                waits[reader] -= 1
                if not waits[reader]:
                    ready.append(reader)
    return order


def _climb_again(space: Space, ledger: Ledger, seed: int) -> None:
    draws = random.Random(seed)
    order: Sequence[int] = range(len(space.groups))
    while not ledger.is_spent:
        even = balance([space.seconds[group] for group in order], space.num_devices)
        _climb(space, ledger, draws, _labels(even, order))
        order = _random_order(space, draws)


greedy_placement = Placer(_climb_again)
"""Hill climbing: move one group to another stage as long as the step gets shorter.

It begins with the most even cuts of the execution order, and with a random order, evenly cut,
whenever no move helps. The seed is of the order of moves and the new beginnings.
"""


def _climb(space: Space, ledger: Ledger, draws: random.Random, labels: tuple[int, ...]) -> None:
    def score_of(candidate: Sequence[int]) -> float | None:
        return ledger.ask(space.stages_of(candidate, range(space.num_devices)))

    here = score_of(labels)
    while here is not None and not ledger.is_spent:
        for moved in _moves(space, labels, draws):
            seconds = score_of(moved)
            if seconds is None:
                return
            if seconds < here:
                labels, here = moved, seconds
                break
        else:
            return


def _moves(
    space: Space, labels: tuple[int, ...], draws: random.Random
) -> Iterator[tuple[int, ...]]:
    """Every labelling that differs in one group, in random order, no stage empty."""
    changes = [(group, to) for group in range(len(labels)) for to in range(space.num_devices)]
    draws.shuffle(changes)
    for group, to in changes:
        moved = (*labels[:group], to, *labels[group + 1 :])
        if to != labels[group] and _is_pipeline(space, moved) and labels[group] in moved:
            yield moved


def _is_pipeline(space: Space, labels: Sequence[int]) -> bool:
    return all(labels[source] <= labels[reader] for source, reader in space.edges)
