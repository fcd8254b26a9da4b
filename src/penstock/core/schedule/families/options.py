"""Options of families, checked so that every refusal reads the same.

Among them are stages with replicas: microbatch k is on replica k mod r of a stage with r replicas,
forward and backward alike. The ranks of stage 0 come first, then those of stage 1, and so on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any

from penstock.base.errors import InputError
from penstock.base.values import is_number, is_whole, items_of, number, shown, whole
from penstock.core.schedule.durations import Placement, snake
from penstock.core.schedule.families.layout import Line, Turns, laid_out
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


_MOST = 10_000
"""More stages per rank, waves or slices than this are a slip of the keyboard."""


def at_least(family: str, option: str, value: Any, least: int, most: int = _MOST) -> None:
    """Raise ``InputError`` unless an option is a whole number from ``least`` to ``most``.

    >>> at_least("interleaved-1f1b", "stages_per_rank", 0, 1)
    Traceback (most recent call last):
    penstock.errors.InputError: interleaved-1f1b: stages_per_rank is 0, but must be ≥ 1
    """
    whole(f"{family}: {option}", value, least, most)


def one_per_rank(family: str, option: str, value: Any, num_ranks: int) -> tuple[float, ...]:
    """A number for each rank, from one number for every rank or a number per rank; infinity is no
    limit.

    Raises:
        InputError: another count, no numbers, or a negative one.
    """
    subject = f"{family}: {option}"
    if is_number(value):
        return (_limit(subject, value),) * num_ranks
    numbers = items_of(value)
    if numbers is None:
        raise InputError(f"{subject} is {shown(value)}; give one number, or one per rank")
    if len(numbers) != num_ranks:
        raise InputError(
            f"{subject} has {len(numbers)} numbers for {num_ranks} ranks; give one, or one per rank"
        )
    return tuple(_limit(subject, limit) for limit in numbers)


def _limit(subject: str, value: Any) -> float:
    return inf if is_number(value) and value == inf else number(subject, value)


def placed(family: str, num_ranks: int, placement: Any) -> Placement:
    """The rank of each stage, from the name of a placement or from the ranks.

    Raises:
        InputError: no such name, a rank that is not there, or a rank without a stage.
    """
    names = {"straight": tuple(range(num_ranks)), "v": snake(num_ranks, 2)}
    if isinstance(placement, str) and placement in names:
        return names[placement]
    ranks = items_of(placement)
    if ranks is None or not all(map(is_whole, ranks)):
        raise InputError(
            f"{family}: placement is {shown(placement)}; take 'straight', 'v', or give the rank of "
            "each stage"
        )
    absent = sorted(set(range(num_ranks)) - set(ranks))
    outside = [rank for rank in ranks if not 0 <= rank < num_ranks]
    if absent or outside:
        wrong = f"rank {absent[0]} has no stage" if absent else f"there is no rank {outside[0]}"
        raise InputError(f"{family}: {wrong} in the placement {ranks} on {num_ranks} ranks")
    return tuple(int(rank) for rank in ranks)
