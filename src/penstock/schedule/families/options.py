"""What families check about their options, so that every refusal reads the same."""

from __future__ import annotations

from math import isnan
from typing import Any

from penstock.errors import InputError
from penstock.schedule.placement import Placement, snake
from penstock.values import is_number, is_whole, items_of


def at_least(family: str, option: str, value: Any, least: int) -> None:
    """Raise ``InputError`` unless an option is a whole number that is large enough.

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


def real(family: str, option: str, value: Any, least: float = 0.0) -> float:
    """``value`` as a float.

    Raises:
        InputError: it is no number, or below ``least``.
    """
    if not is_number(value) or isnan(value):
        raise InputError(f"{family}: {option} is {value!r}, but must be a number ≥ {least:g}")
    if value < least:
        raise InputError(f"{family}: {option} is {value}, but must be ≥ {least:g}")
    return float(value)


def one_per_rank(family: str, option: str, value: Any, num_ranks: int) -> tuple[float, ...]:
    """One number for every rank, or a number per rank, as a number per rank.

    Raises:
        InputError: another count, or no numbers.
    """
    if is_number(value):
        return (real(family, option, value),) * num_ranks
    numbers = items_of(value)
    if numbers is None:
        raise InputError(f"{family}: {option} is {value!r}; give one number, or one per rank")
    if len(numbers) != num_ranks:
        raise InputError(
            f"{family}: {option} has {len(numbers)} numbers for {num_ranks} ranks; give one, or "
            "one per rank"
        )
    return tuple(real(family, option, number) for number in numbers)


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
