"""Stages with replicas: which microbatches each rank takes, and the order of 1F1B among them.

Microbatch k is on replica k mod r of a stage with r replicas, forward and backward alike. The ranks
of stage 0 come first, then those of stage 1, and so on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penstock.base.errors import InputError
from penstock.base.values import is_whole, items_of, shown
from penstock.core.schedule.families.alternate import Line, Turns
from penstock.core.schedule.families.layout import laid_out
from penstock.core.schedule.op import Kind
from penstock.core.schedule.rounds import warm_up
from penstock.core.schedule.schedule import Schedule

_COUNT = re.compile("[0-9]{1,18}")
_MOST_REPLICAS = 10**18

Replicas = str | Sequence[int]
"""One count per stage, as in ``(2, 1, 1)`` or ``"2-1-1"``; nothing for one of each."""

TakeTurns = Callable[[int, Line, Line], Turns]
"""From a stage's warm-up, its forwards and its backwards to their order."""


def read_replicas(replicas: Replicas) -> tuple[int, ...]:
    """A count for every stage; none if nothing is said.

    Raises:
        InputError: it is no list of counts, or one is below 1.
    """
    if not replicas:
        return ()
    parts: Sequence[Any] = items_of(replicas) or (0,)
    if isinstance(replicas, str):
        parts = [int(part) if _COUNT.fullmatch(part) else 0 for part in replicas.split("-")]
    if not all(is_whole(part) and 1 <= part <= _MOST_REPLICAS for part in parts):
        raise InputError(
            f"replicas is {shown(replicas)}; give a count ≥ 1 for every stage, as in 2-1-1"
        )
    return tuple(parts)


def replica_counts(family: str, replicas: Replicas, num_ranks: int) -> tuple[int, ...]:
    """The replicas of each stage.

    Raises:
        InputError: no counts, one below 1, or counts that do not add up to the number of ranks.
    """
    try:
        parts = read_replicas(replicas) or (1,) * num_ranks
    except InputError as error:
        raise InputError(f"{family}: {error}") from None
    if sum(parts) != num_ranks:
        raise InputError(
            f"{family}: replicas {'-'.join(map(str, parts))} are {sum(parts)} ranks, but num_ranks "
            f"is {num_ranks}; make them equal"
        )
    return parts


def round_robin(
    family: str, counts: Sequence[int], num_microbatches: int, order: TakeTurns
) -> Schedule:
    """Every replica's share of the microbatches, in a given order.

    Raises:
        InputError: fewer microbatches than replicas of a stage.
    """
    if num_microbatches < max(counts):
        raise InputError(
            f"{family}: a stage has {max(counts)} replicas, but there are only "
            f"{num_microbatches} microbatches; each replica needs at least one"
        )

    def ranks() -> Iterator[Turns]:
        for stage, count in enumerate(counts):
            for replica in range(count):
                own = range(replica, num_microbatches, count)
                forwards, backwards = (
                    Line(kind, own, stage) for kind in (Kind.FORWARD, Kind.BACKWARD)
                )
                yield order(warm_up(counts, stage), forwards, backwards)

    return laid_out(ranks(), family)
