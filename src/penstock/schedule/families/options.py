"""What families check about their options, so that every refusal reads the same."""

from __future__ import annotations

from math import isinf, isnan
from typing import Any

from penstock.errors import InputError
from penstock.schedule.placement import Placement, snake
from penstock.values import is_number, is_whole, items_of

_MOST = 10_000
"""More stages per rank, waves or slices than this are a slip of the keyboard."""


def at_least(family: str, option: str, value: Any, least: int, most: int = _MOST) -> None:
    """Raise ``InputError`` unless an option is a whole number from ``least`` to ``most``.

    >>> at_least("interleaved-1f1b", "stages_per_rank", 0, 1)
    Traceback (most recent call last):
    penstock.errors.InputError: interleaved-1f1b: stages_per_rank is 0, but must be ≥ 1
    """
    # True is an int to Python, and never what somebody means by a count.
    if not is_whole(value):
        raise InputError(
            f"{family}: {option} is {value!r}, but must be a whole number ≥ {least}; "
            f"write {option}={least} or more"
        )
    if value < least:
        raise InputError(f"{family}: {option} is {value}, but must be ≥ {least}")
    if value > most:
        raise InputError(f"{family}: {option} is {value}, but may be {most:,} at most")


def real(family: str, option: str, value: Any, *, may_be_infinite: bool = False) -> float:
    """``value`` as a float.

    Raises:
        InputError: it is no number, negative, or infinite where it may not be.
    """
    if not is_number(value) or isnan(value) or (isinf(value) and not may_be_infinite):
        raise InputError(f"{family}: {option} is {value!r}, but must be a number ≥ 0")
    if value < 0:
        raise InputError(f"{family}: {option} is {value}, but must be ≥ 0")
    return float(value)


def one_per_rank(family: str, option: str, value: Any, num_ranks: int) -> tuple[float, ...]:
    """One number for every rank, or a number per rank, as a number per rank; infinity is no limit.

    Raises:
        InputError: another count, or no numbers.
    """
    if is_number(value):
        return (real(family, option, value, may_be_infinite=True),) * num_ranks
    numbers = items_of(value)
    if numbers is None:
        raise InputError(f"{family}: {option} is {value!r}; give one number, or one per rank")
    if len(numbers) != num_ranks:
        raise InputError(
            f"{family}: {option} has {len(numbers)} numbers for {num_ranks} ranks; give one, or "
            "one per rank"
        )
    return tuple(real(family, option, number, may_be_infinite=True) for number in numbers)


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
            f"{family}: placement is {placement!r}; take 'straight', 'v', or give the rank of each "
            "stage"
        )
    absent = sorted(set(range(num_ranks)) - set(ranks))
    outside = [rank for rank in ranks if not 0 <= rank < num_ranks]
    if absent or outside:
        wrong = f"rank {absent[0]} has no stage" if absent else f"there is no rank {outside[0]}"
        raise InputError(f"{family}: {wrong} in the placement {ranks} on {num_ranks} ranks")
    return tuple(int(rank) for rank in ranks)
