"""Hill climbing: a placer that does not learn, and did as well as the one that does.

On a chain no placer can be better than ``balance``, which is exact for the slowest stage.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

from penstock.planning.partition.chain import balance
from penstock.planning.partition.placement.ledger import Ledger, Placer
from penstock.planning.partition.placement.space import Space


def labels_of(cuts: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The stage of each group where an order of the groups is cut at these places."""
    labels = [0] * len(order)
    for stage, (start, stop) in enumerate(pairwise(cuts)):
        for group in order[start:stop]:
            labels[group] = stage
    return tuple(labels)


def random_order(space: Space, draws: random.Random) -> list[int]:
    """The groups in a random topological order."""
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
        _climb(space, ledger, draws, labels_of(even, order))
        order = random_order(space, draws)


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
