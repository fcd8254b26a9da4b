"""What families check about their options, so that every refusal reads the same."""

from __future__ import annotations

from math import inf
from typing import Any

from penstock.base.errors import InputError
from penstock.base.values import is_number, is_whole, items_of, number, shown, whole
from penstock.core.schedule.placement import Placement, snake

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
    what = f"{family}: {option}"
    if is_number(value):
        return (_limit(what, value),) * num_ranks
    numbers = items_of(value)
    if numbers is None:
        raise InputError(f"{what} is {shown(value)}; give one number, or one per rank")
    if len(numbers) != num_ranks:
        raise InputError(
            f"{what} has {len(numbers)} numbers for {num_ranks} ranks; give one, or one per rank"
        )
    return tuple(_limit(what, limit) for limit in numbers)


def _limit(what: str, value: Any) -> float:
    return inf if is_number(value) and value == inf else number(what, value)


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
